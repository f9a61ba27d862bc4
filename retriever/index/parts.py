"""An index cut into shards of contiguous rows, one shard in memory, and the shards' answers put together."""

import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Self

import numpy as np

from verl_credit_retriever.index.exact import ExactSearch
from verl_credit_retriever.index.manifest import APPROXIMATE, IndexMismatch
from verl_credit_retriever.index.memory import require_memory
from verl_credit_retriever.index.search import SearchIndex

BLOCK_ROWS = 20_000
Found = tuple[np.ndarray, np.ndarray]
"""Scores float32 [N, K] and rows int64 [N, K]."""


@dataclass(frozen=True)
class Part:
    """Rows first to last - 1 of one index: what a shard serves."""

    number: int
    shards: int
    first: int
    last: int
    fingerprint: str

    def __str__(self) -> str:
        return f"shard {self.number} of {self.shards} (rows {self.first} to {self.last - 1})"


def cut(index: SearchIndex, shards: int, backend: str) -> list[Part]:
    """Shard i of n has the rows from i·N/n to (i + 1)·N/n - 1.

    Errors: ValueError for more shards than rows, and for a kind whose FAISS index is not a list of rows.
    """
    rows, kind = len(index), index.manifest["kind"]
    if not 1 <= shards <= rows:
        raise ValueError(f"--shards={shards}; expected 1 to {rows}, the rows of {index.folder}")
    if backend == "faiss" and kind in APPROXIMATE:
        raise ValueError(
            f"{index.folder}: kind={kind!r} cannot be cut by rows; use --backend exact, which searches its vectors, "
            "or an index of kind flat or exact"
        )
    bounds = [number * rows // shards for number in range(shards + 1)]
    return [
        Part(number, shards, first, last, index.fingerprint)
        for number, (first, last) in enumerate(pairwise(bounds))
    ]


class ShardedIndex(SearchIndex):
    """An index whose vectors are searched by shards; documents are read here, from the same folder.

    `ask(vectors, k)` returns one Found for each of `parts`: the shard's min(k, its rows) best rows.
    """

    parts: Sequence[Part]
    ask: Callable[[np.ndarray, int], Sequence[Found]]

    @classmethod
    def open(cls, folder: Path, parts: Sequence[Part], ask) -> Self:
        index = load_same(folder, parts[0].fingerprint, cls)
        index.parts, index.ask = parts, ask
        return index

    def _search(self, vectors_N_D: np.ndarray, k: int) -> Found:
        answers = self.ask(vectors_N_D, k)
        for part, (scores_N_K, rows_N_K) in zip(self.parts, answers, strict=True):
            right = (len(vectors_N_D), min(k, part.last - part.first))
            if scores_N_K.shape != right or rows_N_K.shape != right:
                raise IndexMismatch(f"{part} gave hits of shape {rows_N_K.shape}; expected {right}")
            if rows_N_K.min() < part.first or rows_N_K.max() >= part.last:
                raise IndexMismatch(f"{part} gave rows from {rows_N_K.min()} to {rows_N_K.max()}")
        scores_N_M, rows_N_M = (np.concatenate(each, axis=1) for each in zip(*answers, strict=True))
        # Ordered by score, then row, as every index orders its hits.
        scores_N_M, rows_N_M = self._checked(scores_N_M, rows_N_M)
        return scores_N_M[:, :k], rows_N_M[:, :k]


def load_same(folder: Path, fingerprint: str, kind: type[SearchIndex] = SearchIndex) -> SearchIndex:
    """The index in `folder`, its vectors left in the file. Errors: IndexMismatch when it has another fingerprint."""
    index = kind.load(folder, backend="exact", mmap=True, verify="known")
    if index.fingerprint != fingerprint:
        raise IndexMismatch(
            f"{folder} on {socket.gethostname()} has the fingerprint {index.fingerprint}; this deployment serves "
            f"{fingerprint}"
        )
    return index


class Shard:
    """A replica of a shard holds `part` of the index in `folder`. Several threads may search at once.

    Errors: IndexMismatch when the folder is damaged or has another fingerprint; MemoryRefused.
    """

    def __init__(self, folder: str, part: Part, backend: str, threads: int):
        index = load_same(Path(folder), part.fingerprint)
        self._part = part
        vectors_M_D = index.vectors_M_D[part.first : part.last]
        spec = {**index.manifest, "kind": "flat", "rows": len(vectors_M_D), "parameters": {}}
        require_memory(spec, backend=backend)
        if backend == "exact" or index.manifest["kind"] == "exact":
            self._search = ExactSearch(np.array(vectors_M_D)).search
            return
        import faiss

        from verl_credit_retriever.index import faiss_kinds

        faiss.omp_set_num_threads(threads)
        rows, dim = vectors_M_D.shape
        blocks = lambda: (vectors_M_D[first : first + BLOCK_ROWS] for first in range(0, rows, BLOCK_ROWS))  # noqa: E731
        shape = {"rows": rows, "dim": dim, "dtype": str(vectors_M_D.dtype)}
        self._search = faiss_kinds.create("flat", blocks, None, **shape, parameters={}).search

    def search(self, part: Part, vectors_N_D: np.ndarray, k: int) -> Found:
        """The min(k, rows of the part) best rows of each vector. Errors: IndexMismatch when `part` is not the own."""
        if part != self._part:
            raise IndexMismatch(
                f"asked for {part} of {part.fingerprint}; here is {self._part} of {self._part.fingerprint}"
            )
        scores_N_K, rows_N_K = self._search(vectors_N_D, min(k, part.last - part.first))
        return scores_N_K, rows_N_K + part.first
