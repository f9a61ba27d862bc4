"""Keys and values of rows that were read before, for contexts that begin alike: a turn's context has the one before it."""

from __future__ import annotations

from bisect import bisect, insort
from collections.abc import Iterable, Sequence

import torch
from torch.nn.functional import pad

from verl_credit.policy.cache import RowCache

Ids = tuple[int, ...]
MOST_BYTES = 2**29
"""Bytes that are kept; the oldest rows go first. The lab's policy has 1.5 kB for each token."""


class Prefixes:
    """Rows by their tokens, each with the keys and values of every layer, [heads, tokens, head_dim]."""

    def __init__(self) -> None:
        self._sorted: list[Ids] = []
        self._rows: dict[Ids, list[list[torch.Tensor]]] = {}
        self._bytes = 0

    def keep(self, rows: Iterable[tuple[int, Ids]], cache: RowCache) -> None:
        """Keeps these rows of the cache, whose tokens are its last ones."""
        for row, ids in rows:
            if ids not in self._rows:
                both = [(layer.keys[row], layer.values[row]) for layer in cache.layers]
                self._rows[ids] = [[x[:, -len(ids) :].clone() for x in one] for one in both]
                self._bytes += self._bytes_of(ids)
                insort(self._sorted, ids)
        while self._bytes > MOST_BYTES:
            oldest = next(iter(self._rows))
            self._bytes -= self._bytes_of(oldest)
            del self._rows[oldest], self._sorted[bisect(self._sorted, oldest) - 1]

    def _bytes_of(self, ids: Ids) -> int:
        return sum(x.nbytes for both in self._rows[ids] for x in both)

    def nearest(self, context: Ids) -> tuple[Ids, int]:
        """(the kept row that begins most like the context, in how many tokens), the context's last one left out."""
        at, best, most = bisect(self._sorted, context), (), 0
        for ids in self._sorted[max(at - 1, 0) : at + 1]:  # in this order the most alike stands beside it
            pairs = enumerate(zip(ids, context, strict=False))
            n = next((i for i, (a, b) in pairs if a != b), min(len(ids), len(context)))
            best, most = (ids, n) if n > most else (best, most)
        return best, min(most, len(context) - 1)

    def fill(self, cache: RowCache, taken: Sequence[tuple[Ids, int]], width: int) -> None:
        """The rows of an empty cache become the first tokens of kept rows, with padding on the left."""
        for number, layer in enumerate(cache.layers):
            kept = [[x[:, :n] for x in self._rows[ids][number]] for ids, n in taken]
            padded = [[pad(x, (0, 0, width - x.shape[1], 0)) for x in both] for both in kept]
            layer.update(*(torch.stack(some) for some in zip(*padded, strict=True)))
