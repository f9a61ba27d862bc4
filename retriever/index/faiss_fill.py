"""Fills a FAISS index after reserving memory for all rows, so that it takes no more than the memory plan.

Otherwise FAISS doubles its vectors whenever they are full and copies them: 65 GB of rows then take 126 GB.
"""

from collections.abc import Callable, Iterable

import faiss
import numpy as np


def fill(index, blocks: Callable[[], Iterable[np.ndarray]], rows: int) -> None:
    """Add the `rows` vectors of all blocks, in order, to a trained and empty CPU index; `blocks()` may run twice."""
    if isinstance(index, faiss.IndexIVF):
        return _fill_lists(index, blocks, rows)
    storage = index
    if isinstance(index, faiss.IndexHNSW):
        _reserve_graph(index.hnsw, rows)
        storage = faiss.downcast_index(index.storage)
    _reserve(storage.codes, rows * storage.code_size)
    for block in blocks():
        index.add(_float32(block))


def _fill_lists(index, blocks: Callable[[], Iterable[np.ndarray]], rows: int) -> None:
    """Assign each row to its list first, so that every list can be reserved at its final length."""
    list_M, first = np.empty(rows, dtype=np.int64), 0
    for block in blocks():
        _, list_C_1 = index.quantizer.search(_float32(block), 1)
        list_M[first : first + len(block)] = list_C_1[:, 0]
        first += len(block)
    lists = index.invlists
    for number, length in enumerate(np.bincount(list_M, minlength=index.nlist).tolist()):
        lists.resize(number, length)
        lists.resize(number, 0)
    first = 0
    for block in blocks():
        vectors_C_D, list_C = _float32(block), list_M[first : first + len(block)]
        index.add_core(len(block), faiss.swig_ptr(vectors_C_D), None, faiss.swig_ptr(list_C))
        first += len(block)


def _reserve_graph(hnsw, rows: int) -> None:
    """Reserve 2m links per row at the bottom, the expected m/(m - 1) above (levels are random), and a margin."""
    m = hnsw.nb_neighbors(1)
    above = rows * m / (m - 1)
    _reserve(hnsw.neighbors, rows * 2 * m + int(above + 10 * m * (rows / m) ** 0.5) + 1000)
    _reserve(hnsw.levels, rows)
    _reserve(hnsw.offsets, rows + 1, keep=1)


def _reserve(vector, size: int, keep: int = 0) -> None:
    """std::vector's reserve, which FAISS does not expose: a vector that shrinks keeps its capacity."""
    vector.resize(size)
    vector.resize(keep)


def _float32(block: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(block, dtype=np.float32)
