"""One replica of one shard: its rows in memory, searched. Imports no Ray and no torch."""

from pathlib import Path

import numpy as np

from verl_credit_retriever.deploy.parts import Found, Part, load_same
from verl_credit_retriever.index.exact import ExactSearch
from verl_credit_retriever.index.manifest import IndexMismatch
from verl_credit_retriever.index.memory import require_memory

BLOCK_ROWS = 20_000


class Shard:
    """Holds `part` of the index in `folder`. Several threads may search at once.

    Errors: IndexMismatch when the folder is damaged or has another fingerprint; MemoryRefused.
    """

    def __init__(self, folder: str, part: Part, backend: str, threads: int):
        index = load_same(Path(folder), part.fingerprint)
        self._part = part
        vectors_M_D = index.vectors()[part.first : part.last]
        spec = {**index.manifest, "kind": "flat", "rows": len(vectors_M_D), "parameters": {}}
        require_memory(spec, backend=backend)
        exact = backend == "exact" or index.manifest["kind"] == "exact"
        self._search = ExactSearch(np.array(vectors_M_D)).search if exact else _flat(vectors_M_D, threads)

    def search(self, part: Part, vectors_N_D: np.ndarray, k: int) -> Found:
        """The min(k, rows of the part) best rows of each vector. Errors: IndexMismatch when `part` is not the own."""
        if part != self._part:
            raise IndexMismatch(
                f"asked for {part} of {part.fingerprint}; here is {self._part} of {self._part.fingerprint}"
            )
        scores_N_K, rows_N_K = self._search(vectors_N_D, min(k, part.last - part.first))
        return scores_N_K, rows_N_K + part.first


def _flat(vectors_M_D: np.ndarray, threads: int):
    import faiss

    from verl_credit_retriever.index import faiss_kinds

    faiss.omp_set_num_threads(threads)
    rows, dim = vectors_M_D.shape
    blocks = lambda: (vectors_M_D[first : first + BLOCK_ROWS] for first in range(0, rows, BLOCK_ROWS))  # noqa: E731
    flat = faiss_kinds.create(
        "flat", blocks, None, rows=rows, dim=dim, dtype=str(vectors_M_D.dtype), parameters={}
    )
    return flat.search
