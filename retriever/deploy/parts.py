"""An index cut into shards of contiguous rows, and their answers put together. Imports no Ray."""

import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Self

import numpy as np

from verl_credit_retriever.index.manifest import APPROXIMATE, IndexMismatch
from verl_credit_retriever.index.search import SearchIndex

Found = tuple[np.ndarray, np.ndarray]
"""Scores float32 [N, K] and rows int64 [N, K]."""


@dataclass(frozen=True)
class Part:
    """Rows first to last - 1 of one index: what a shard serves, and what it is asked for."""

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
        found = list(zip(self.parts, self.ask(vectors_N_D, k), strict=True))
        for part, answer in found:
            _check_answer(part, answer, len(vectors_N_D), k)
        scores_N_M = np.concatenate([scores for _, (scores, _) in found], axis=1)
        rows_N_M = np.concatenate([rows for _, (_, rows) in found], axis=1)
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


def _check_answer(part: Part, answer: Found, queries: int, k: int) -> None:
    """Errors: IndexMismatch for fewer or more hits than the shard has, and for rows that are not its own."""
    scores_N_K, rows_N_K = answer
    right = (queries, min(k, part.last - part.first))
    if scores_N_K.shape != right or rows_N_K.shape != right:
        raise IndexMismatch(f"{part} gave hits of shape {rows_N_K.shape}; expected {right}")
    if rows_N_K.min() < part.first or rows_N_K.max() >= part.last:
        raise IndexMismatch(f"{part} gave rows from {rows_N_K.min()} to {rows_N_K.max()}")
