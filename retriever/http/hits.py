"""The answer to one query, the check that it can be one, and the cache of answers."""

import math
from collections import OrderedDict

Hits = list[tuple[dict, float]]
ENTRY_BYTES = 400  # an entry's key, list and dictionaries, without their texts
HIT_BYTES = 300


class BadHits(RuntimeError):
    """The index gave an impossible answer; the request is not at fault."""


def check_hits(hits_N: list[Hits], *, queries: int, k: int) -> list[Hits]:
    """`hits_N` unchanged, if it is one list of k hits per query, best first, with finite scores.

    Errors: BadHits, also for a missing document and for one that occurs twice.
    """
    if len(hits_N) != queries:
        raise BadHits(f"the search answered {len(hits_N)} of {queries} queries")
    for hits in hits_N:
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
    return hits_N


class ResultCache:
    """A least-recently-used cache: maps (exact query text, k) to the hits of that query in one index.

    Queries are not normalised, because the encoder may distinguish two spellings. The cache is bounded by
    `max_entries` (0 switches it off) and by `max_bytes` of estimated memory. A kept answer is the same object as the
    first one, so it is bit-equal. For one thread.
    """

    def __init__(self, *, max_entries: int, max_bytes: int):
        self._max_entries, self._max_bytes = max_entries, max_bytes
        self._kept: OrderedDict[tuple[str, int], tuple[Hits, int]] = OrderedDict()
        self.bytes = 0

    def __len__(self) -> int:
        return len(self._kept)

    def get(self, query: str, k: int) -> Hits | None:
        """The kept hits, or None."""
        if (query, k) not in self._kept:
            return None
        self._kept.move_to_end((query, k))
        return self._kept[query, k][0]

    def put(self, query: str, k: int, hits: Hits) -> None:
        """Keep an answer, and drop the oldest ones that no longer fit."""
        key, size = (query, k), _estimated_bytes(query, hits)
        if key in self._kept:
            self.bytes -= self._kept.pop(key)[1]
        if self._max_entries == 0 or size > self._max_bytes:
            return
        self._kept[key] = (hits, size)
        self.bytes += size
        while len(self._kept) > self._max_entries or self.bytes > self._max_bytes:
            self.bytes -= self._kept.popitem(last=False)[1][1]


def _estimated_bytes(query: str, hits: Hits) -> int:
    # Python needs at most four bytes a character, for texts with an emoji in them.
    texts = 4 * len(query) + sum(4 * (len(d["id"]) + len(d["contents"])) + HIT_BYTES for d, _ in hits)
    return ENTRY_BYTES + texts
