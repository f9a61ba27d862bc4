"""The answer to one query, and the check that it can be an answer."""

import math

Hits = list[tuple[dict, float]]


class BadHits(RuntimeError):
    """The index gave an impossible answer; the request is not at fault."""


def check_hits(found: list[Hits], *, queries: int, k: int) -> list[Hits]:
    """`found` unchanged, if it is one list of k hits per query, best first, with finite scores.

    Errors: BadHits, also for a missing document and for one that occurs twice.
    """
    if len(found) != queries:
        raise BadHits(f"the search answered {len(found)} of {queries} queries")
    for hits in found:
        if len(hits) != k:
            raise BadHits(f"the search gave {len(hits)} hits for a query; expected {k}")
        last = math.inf
        for document, score in hits:
            if not (isinstance(document, dict) and {"id", "contents"} <= document.keys()):
                raise BadHits(f"the search gave a hit without a document: {str(document)[:80]!r}")
            if not (math.isfinite(score) and score <= last):
                raise BadHits(f"the search gave the score {score} after {last}; expected finite and falling")
            last = score
        if len({document["id"] for document, _ in hits}) != len(hits):
            raise BadHits("the search gave a document twice")
    return found
