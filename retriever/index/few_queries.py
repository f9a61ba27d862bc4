"""Few queries over a flat FAISS index, on all threads: FAISS lets one thread read all vectors for a single query."""

from concurrent.futures import ThreadPoolExecutor

import faiss
import numpy as np

LEAST = 1 << 23
"""Numbers of the vectors in a part: a core reads them in 3 ms, and threads start in a tenth of that."""


def search(index, queries_N_D: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """(scores float32 [N, K], rows int64 [N, K]) with the scores of `index.search`. Where there are more threads than
    queries, each thread takes a part of a flat index's rows. Which of several rows with the k-th score are found depends on
    the parts: FAISS drops the first of them when a better row comes later."""
    rows, dim = index.ntotal, index.d
    parts = min(faiss.omp_get_max_threads() // len(queries_N_D), rows * dim // LEAST)
    if parts < 2 or k > rows // parts or not isinstance(index, faiss.IndexFlat):
        return index.search(queries_N_D, k)
    vectors_M_D = faiss.rev_swig_ptr(index.get_xb(), rows * dim).reshape(rows, dim)  # the index's own memory

    def part(number: int) -> tuple[np.ndarray, np.ndarray]:
        first, end = rows * number // parts, rows * (number + 1) // parts
        scores_N_K, rows_N_K = faiss.knn(queries_N_D, vectors_M_D[first:end], k, faiss.METRIC_INNER_PRODUCT)
        return scores_N_K, rows_N_K + first

    with ThreadPoolExecutor(parts) as threads:
        found = [*threads.map(part, range(parts))]
    scores_N_K, rows_N_K = (np.concatenate(several, axis=1) for several in zip(*found, strict=True))
    best_N_K = np.lexsort((rows_N_K, -scores_N_K), axis=1)[:, :k]
    return np.take_along_axis(scores_N_K, best_N_K, 1), np.take_along_axis(rows_N_K, best_N_K, 1)
