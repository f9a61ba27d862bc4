"""Checks servers against the index: recall against exact search, texts, scores, and the fingerprint."""

import asyncio
import json
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from verl_credit_retriever.asking import Replies, Served, ask, just_below

SCORE_ERROR = 1e-4
"""An exact kind's score may differ from the exact one by this much, relative above 1."""
ORACLE_CHUNK = 64  # queries of one exact search
HARMLESS = ("200", "429", "503", "504")  # overload is answered with these; anything else is a fault


def exact_answers(index, vectors_N_D: np.ndarray, k: int) -> list[dict[str, Served]]:
    """Returns per query the k best documents by id, plus every document that ties with the k-th.

    `index` is a SearchIndex with the exact backend. The depth doubles until the last score no longer ties with the
    k-th.
    """
    answers: list[dict[str, Served]] = []
    k = min(k, len(index))
    for start in range(0, len(vectors_N_D), ORACLE_CHUNK):
        chunk_N_D = vectors_N_D[start : start + ORACLE_CHUNK]
        depth = min(2 * k, len(index))
        hits_N = index.search(chunk_N_D, depth)
        while depth < len(index) and any(hits[-1][1] >= just_below(hits[k - 1][1]) for hits in hits_N):
            depth = min(2 * depth, len(index))
            hits_N = index.search(chunk_N_D, depth)
        for hits in hits_N:
            served = [Served(document["id"], document["contents"], score) for document, score in hits]
            answers.append({hit.id: hit for hit in served})
    return answers


def recall_at(served: list[Served], exact: dict[str, Served], k: int) -> float:
    """Share of the k best documents that were served among the first k.

    recall@k = |first k served ∩ {d : s(d) >= s_k up to TIE}| / min(k, rows), with s the exact score and s_k the
    k-th best of them. Any of several documents with equal scores may be served.
    """
    best = sorted((hit.score for hit in exact.values()), reverse=True)[:k]
    right = sum(hit.id in exact and exact[hit.id].score >= just_below(best[-1]) for hit in served[:k])
    return right / len(best)


def wrong_text(served: list[Served], exact: dict[str, Served]) -> str | None:
    """The id of a hit whose contents differ from the corpus, among those in the exact answer."""
    wrong = (hit.id for hit in served if hit.id in exact and exact[hit.id].contents != hit.contents)
    return next(wrong, None)


def score_error(served: list[Served], exact: dict[str, Served]) -> float:
    """The largest |served score - exact score| over the hits in the exact answer; 0 for none."""
    return max((abs(hit.score - exact[hit.id].score) for hit in served if hit.id in exact), default=0.0)


def equal_list(served: list[Served], exact: dict[str, Served]) -> bool:
    """Are these the best documents in their order? Documents whose scores differ by rounding may change places."""
    found = [exact[hit.id].score if hit.id in exact else -math.inf for hit in served]
    best = sorted((hit.score for hit in exact.values()), reverse=True)
    return all(score >= just_below(right) for score, right in zip(found, best, strict=False))


def wrong_score(served: list[Served], exact: dict[str, Served]) -> str | None:
    """The first hit whose score is further than `SCORE_ERROR` from the exact one, relative above 1, with both."""
    for hit in served:
        right = exact[hit.id].score if hit.id in exact else hit.score
        if not abs(hit.score - right) <= SCORE_ERROR * max(1.0, abs(right)):
            return f"document {hit.id!r} has score {hit.score:.6g}; exact: {right:.6g}"
    return None


def has_exact_scores(manifest: dict) -> bool:
    """Returns whether every score is the inner product with the stored vector. It is not for sq8, nor for ivf in float16,
    which rounds a vector's residual to its list."""
    kind, dtype = manifest["kind"], manifest["dtype"]
    return kind != "sq8" and (kind, dtype) != ("ivf", "float16")


def read_queries(path: Path) -> list[str]:
    """Queries of a .txt file (one a line) or .jsonl (a string, or an object with "query" or "question").

    Errors: ValueError names the file and line; empty lines are skipped; no query is an error.
    """
    queries = []
    for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), start=1):
        if not line.strip():
            continue
        query, where = line.strip(), f"{path}:{number}"
        if path.suffix == ".jsonl":
            try:
                row = json.loads(line)
            except ValueError as error:
                raise ValueError(f"{where}: not JSON ({error}); use .txt for one query per line") from None
            query = row.get("query", row.get("question")) if isinstance(row, dict) else row
        if not isinstance(query, str) or not query.strip():
            problem = 'expected a text, or an object with "query" or "question"'
            raise ValueError(f"{where}: {line[:80]!r}; {problem}")
        queries.append(query)
    if not queries:
        raise ValueError(f"{path}: no queries; expected one per line")
    return queries


def check_servers(
    urls: Sequence[str],
    index,
    encoder,
    queries: Sequence[str],
    *,
    ks: Sequence[int] = (3, 10),
    min_recall: float | None = None,
    token: str | None = None,
) -> dict:
    """Compare the answers of `urls` with exact search over `index` (backend "exact").

    Every query is sent to every server by itself, 8 at a time; a busy server is tried again for two minutes. Returns
    a JSON report. `problems` is empty when recall at every k is at least `min_recall` (default by kind), the scores
    are exact where the kind computes exact ones (`has_exact_scores`), /info shows the folder's fingerprint, no answer
    is malformed, and every status is 200, 429, 503 or 504. Errors: ValueError for bad numbers.
    """
    if not ks or any(k < 1 for k in ks):
        raise ValueError(f"k={','.join(map(str, ks))!r}; expected integers of at least 1")
    index.check_encoder(encoder)
    if min_recall is None:
        # Near ties may round differently in kinds that search exactly.
        min_recall = 0.99 if index.manifest["kind"] in ("flat", "exact") else 0.95
    top = max(ks)
    exact = exact_answers(index, encoder.encode_queries(list(queries)), top)
    problems, servers = [], {}
    for url in urls:
        replies = asyncio.run(ask(url, queries, top, rows=len(index), token=token))
        servers[url], of_server = _judge(replies, exact, index, ks, min_recall)
        problems += [f"{url}: {problem}" for problem in of_server]
    return {
        "fingerprint": index.fingerprint,
        "kind": index.manifest["kind"],
        "rows": len(index),
        "queries": len(queries),
        "min_recall": min_recall,
        "servers": servers,
        "problems": problems,
    }


def _judge(
    replies: Replies, exact: list[dict], index, ks: Sequence[int], min_recall: float
) -> tuple[dict, list[str]]:
    """(the report of one server, its problems); a query without an answer has recall 0."""
    answers = [(hits, exact[place]) for place, hits in replies.answers.items()]
    recall = {str(k): sum(recall_at(hits, right, k) for hits, right in answers) / len(exact) for k in ks}
    malformed = list(replies.malformed)
    for hits, right in answers:
        if wrong := wrong_text(hits, right):
            malformed.append(f"document {wrong!r} has other contents than the corpus")
    statuses = dict(sorted(replies.statuses.items()))
    report = {
        "fingerprint": replies.fingerprint,
        "recall": recall,
        "max_score_error": max((score_error(*answer) for answer in answers), default=None),
        "equal_lists": sum(equal_list(*answer) for answer in answers) / len(exact),
        "answered": len(answers),
        "statuses": statuses,
    }
    problems = [
        f"{count} requests ended with {status}"
        for status, count in statuses.items()
        if status not in HARMLESS
    ]
    if malformed:
        problems.append(f"{len(malformed)} malformed answers, the first: {malformed[0]}")
    if replies.fingerprint != index.fingerprint:
        problems.append(f"fingerprint={replies.fingerprint}; the folder has {index.fingerprint}")
    if len(answers) < len(exact):
        problems.append(f"{len(answers)} of {len(exact)} queries were answered")
    for k in recall:
        if recall[k] < min_recall:
            problems.append(f"recall@{k}={recall[k]:.4f}; expected at least {min_recall}")
    scored = answers if has_exact_scores(index.manifest) else ()
    if wrong := [problem for answer in scored if (problem := wrong_score(*answer))]:
        problems.append(f"{len(wrong)} answers with wrong scores, the first: {wrong[0]}")
    return report, problems
