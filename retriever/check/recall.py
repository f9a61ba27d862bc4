"""Parses served answers and computes their recall against exact search."""

import math
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

TIE = 1e-5  # scores this close (relative above 1) count as equal; a vector depends on its batch by less
SCORE_ERROR = 1e-4  # an exact kind's score may differ from the exact one by this much, relative above 1
ORACLE_CHUNK = 64  # queries of one exact search


class MalformedAnswer(ValueError):
    """A 200 whose body does not answer the request."""


@dataclass(frozen=True)
class Served:
    """One hit of an answer."""

    id: str
    contents: str
    score: float


def parse_served(body: object, k: int, rows: int) -> list[Served]:
    """The hits of a POST /retrieve answer to one query with return_scores, best first.

    Errors: MalformedAnswer unless there are exactly min(k, rows) different documents with finite scores that
    do not rise.
    """
    try:
        (hits,) = body["result"]
        served = [Served(hit["document"]["id"], hit["document"]["contents"], hit["score"]) for hit in hits]
    except (KeyError, TypeError, ValueError) as error:
        raise MalformedAnswer(f"not one list of hits with document and score: {error!r}") from None
    if len(served) != min(k, rows):
        raise MalformedAnswer(f"{len(served)} hits; expected {min(k, rows)} (k={k}, {rows} rows)")
    for hit in served:
        if not isinstance(hit.id, str) or not isinstance(hit.contents, str) or not hit.contents:
            raise MalformedAnswer(f"document {hit.id!r} has no text id and contents")
        if isinstance(hit.score, bool) or not isinstance(hit.score, int | float):
            raise MalformedAnswer(f"document {hit.id!r}: score={hit.score!r}; expected a number")
        if not math.isfinite(hit.score):
            raise MalformedAnswer(f"document {hit.id!r}: score={hit.score!r}; expected a finite number")
    if len({hit.id for hit in served}) != len(served):
        raise MalformedAnswer("a document is there twice")
    if any(_just_below(after.score) > before.score for before, after in pairwise(served)):
        raise MalformedAnswer("scores rise: the hits are not best first")
    return served


def exact_answers(index, vectors_N_D: np.ndarray, k: int) -> list[dict[str, Served]]:
    """Per query the k best documents by id, plus every document that ties with the k-th.

    `index` is a SearchIndex with the exact backend. The depth doubles until the last score no longer ties with the
    k-th.
    """
    answers: list[dict[str, Served]] = []
    k = min(k, len(index))
    for start in range(0, len(vectors_N_D), ORACLE_CHUNK):
        chunk_N_D = vectors_N_D[start : start + ORACLE_CHUNK]
        depth = min(2 * k, len(index))
        found = index.search(chunk_N_D, depth)
        while depth < len(index) and any(hits[-1][1] >= _just_below(hits[k - 1][1]) for hits in found):
            depth = min(2 * depth, len(index))
            found = index.search(chunk_N_D, depth)
        for hits in found:
            served = [Served(document["id"], document["contents"], score) for document, score in hits]
            answers.append({hit.id: hit for hit in served})
    return answers


def recall_at(served: list[Served], exact: dict[str, Served], k: int) -> float:
    """Share of the k best documents that were served among the first k.

    recall@k = |first k served ∩ {d : s(d) >= s_k up to TIE}| / min(k, rows), with s the exact score and s_k the
    k-th best of them. Any of several documents with equal scores may be served.
    """
    best = sorted((hit.score for hit in exact.values()), reverse=True)[:k]
    right = sum(hit.id in exact and exact[hit.id].score >= _just_below(best[-1]) for hit in served[:k])
    return right / len(best)


def wrong_text(served: list[Served], exact: dict[str, Served]) -> str | None:
    """The id of a hit whose contents differ from the corpus, among those in the exact answer."""
    for hit in served:
        if hit.id in exact and exact[hit.id].contents != hit.contents:
            return hit.id
    return None


def score_error(served: list[Served], exact: dict[str, Served]) -> float:
    """The largest |served score - exact score| over the hits in the exact answer; 0 for none."""
    return max((abs(hit.score - exact[hit.id].score) for hit in served if hit.id in exact), default=0.0)


def wrong_score(served: list[Served], exact: dict[str, Served]) -> str | None:
    """The first hit whose score is further than SCORE_ERROR from the exact one, with both."""
    for hit in served:
        right = exact[hit.id].score if hit.id in exact else hit.score
        if not abs(hit.score - right) <= SCORE_ERROR * max(1.0, abs(right)):
            return f"document {hit.id!r} has score {hit.score:.6g}; exact: {right:.6g}"
    return None


def _just_below(score: float) -> float:
    """The lowest score that counts as equal to `score`."""
    return score - TIE * max(1.0, abs(score))
