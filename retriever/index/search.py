"""A loaded index: vectors in FAISS or in the exact backend, with their documents beside them."""

import logging
from pathlib import Path

import numpy as np

from verl_credit_retriever.index.build import build_index
from verl_credit_retriever.index.corpus import Documents
from verl_credit_retriever.index.exact import ExactSearch, open_vectors
from verl_credit_retriever.index.kinds import need_faiss, resolve_search
from verl_credit_retriever.index.manifest import (
    APPROXIMATE,
    IndexMismatch,
    check_encoder,
    check_files,
    fingerprint,
    read_manifest,
    require_equal,
)
from verl_credit_retriever.index.memory import plan_gpus, require_recorded
from verl_credit_retriever.index.place import refuse_replacement

__all__ = ["SearchIndex", "build_index"]

log = logging.getLogger("verl_credit_retriever")


class SearchIndex:
    """A loaded index. Several threads may call `search` at once.

    `manifest` is the file's content, `search_parameters` are those in force, `memory` is its MemoryPlan, and
    `backend` is "faiss" or "exact" (always "exact" for kind exact). `vectors_M_D` are the vectors as they were
    encoded, in the index's dtype: a read-only memory map.
    """

    def __init__(self, folder: Path, manifest: dict, vectors_M_D, documents, *, backend, search, memory):
        self.folder, self.manifest, self.documents = folder, manifest, documents
        self.backend, self.search_parameters, self.memory = backend, search, memory
        self.vectors_M_D = vectors_M_D
        self._exact = ExactSearch(vectors_M_D)
        self._faiss = None

    def __len__(self) -> int:
        return len(self.documents)

    @property
    def fingerprint(self) -> str:
        """Hex digest of what determines the answers, search parameters included; the same for both backends."""
        return fingerprint(self.manifest, search=self.search_parameters)

    @classmethod
    def load(
        cls,
        folder: str | Path,
        *,
        verify: str = "all",
        backend: str = "faiss",
        mmap: bool = False,
        gpu: bool = False,
        **search: int | None,
    ) -> "SearchIndex":
        """Load an index after comparing its files with its manifest, if it fits into memory.

        The exact backend needs no FAISS and searches every kind's original vectors. `mmap` leaves the vectors in
        the file, in memory that all processes share. `gpu` divides the index over all GPUs that FAISS sees. `search`
        (nprobe, refine, ef_search) overrides the manifest's. `verify` is that of `check_files`. The memory plan is logged.

        Errors: IndexMismatch names the file, its value and the right one, or a folder replaced while loading;
        MemoryRefused says what would fit; ValueError for a parameter without effect, and for `gpu` without a GPU
        that FAISS can use.
        """
        with refuse_replacement(Path(folder)):
            return cls._load(Path(folder), verify, backend, mmap, gpu, search)

    @classmethod
    def _load(cls, folder, verify, backend, mmap, gpu, given) -> "SearchIndex":
        manifest = read_manifest(folder)
        kind = manifest["kind"]
        backend = "exact" if kind == "exact" else backend
        mmap = mmap or (gpu and kind == "flat")  # the file is copied to the GPUs
        if backend == "exact" and gpu:
            raise ValueError("gpu: the exact backend runs on the CPU")
        recorded, memory = require_recorded(folder, manifest, backend=backend, mmap=mmap)
        search = resolve_search(kind, manifest["parameters"], recorded, given)
        log.info("%s: %s", folder, memory.text())
        check_files(folder, manifest, verify)
        files = (open_vectors(folder, manifest), _open_documents(folder, manifest))
        index = cls(folder, manifest, *files, backend=backend, search=search, memory=memory)
        if backend == "faiss":
            faiss_kinds = need_faiss("backend='faiss'", " or use backend='exact'")
            if gpu:
                index._load_on_gpus(faiss_kinds)
            else:
                index._faiss = faiss_kinds.read(folder / "index.faiss", manifest, mmap=mmap)
                faiss_kinds.set_search(index._faiss, search)
        elif not mmap:
            index._exact = ExactSearch(np.array(index.vectors_M_D))
        return index

    def check_encoder(self, encoder) -> None:
        """Refuse an encoder other than the one that built the index. Errors: IndexMismatch."""
        check_encoder(self.manifest, encoder.fingerprint())

    def search(self, vectors_N_D: np.ndarray, k: int) -> list[list[tuple[dict, float]]]:
        """The k documents of largest inner product per vector, best first: N lists of (document, score).

        k above the number of rows returns all rows. The exact backend answers a query for which ivf, ivfpq or hnsw finds
        fewer than k. Equal scores come in order of their rows. Errors: ValueError for k < 1, a wrong shape or
        vectors that are not finite; IndexMismatch when the index gives an impossible hit.
        """
        if isinstance(k, bool) or not isinstance(k, int) or k < 1:
            raise ValueError(f"k={k!r}; expected an integer of at least 1")
        vectors_N_D = np.ascontiguousarray(vectors_N_D, dtype=np.float32)
        dim = self.manifest["dim"]
        if vectors_N_D.ndim != 2 or vectors_N_D.shape[1] != dim:
            raise ValueError(f"vectors of shape {vectors_N_D.shape}; expected [N, {dim}]")
        if not np.isfinite(vectors_N_D).all():
            raise ValueError("vectors hold NaN or infinity")
        if not len(vectors_N_D):
            return []
        scores_N_K, rows_N_K = self._search(vectors_N_D, min(k, len(self)))
        return [
            [(self.documents[row], score) for row, score in zip(rows, scores, strict=True)]
            for rows, scores in zip(rows_N_K.tolist(), scores_N_K.tolist(), strict=True)
        ]

    def _search(self, vectors_N_D: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        if self._faiss is None:
            return self._checked(*self._exactly(vectors_N_D, k))
        candidates = min(len(self), k * self.search_parameters.get("refine", 1))
        scores_N_K, rows_N_K = self._faiss.search(vectors_N_D, candidates)
        if self.manifest["kind"] == "ivfpq":  # its codes are rough: the candidates' own vectors decide
            scores_N_K, rows_N_K = self._exact.among(vectors_N_D, rows_N_K, k)
        short_N = (rows_N_K == -1).any(axis=1)
        if short_N.any() and self.manifest["kind"] in APPROXIMATE:
            scores_N_K[short_N], rows_N_K[short_N] = self._exactly(vectors_N_D[short_N], k)
        return self._checked(scores_N_K, rows_N_K)

    def _exactly(self, vectors_N_D: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        try:
            return self._exact.search(vectors_N_D, k)
        except ValueError as error:
            raise IndexMismatch(f"{self.folder}: {error}; rebuild the index") from None

    def _checked(self, scores_N_K: np.ndarray, rows_N_K: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The hits ordered by score, then row, after checking that scores are finite and rows exist and differ."""
        if not np.isfinite(scores_N_K).all() or rows_N_K.min() < 0 or rows_N_K.max() >= len(self):
            raise IndexMismatch(f"{self.folder}: a hit without a document or score; rebuild the index")
        if (np.diff(np.sort(rows_N_K, axis=1), axis=1) == 0).any():
            raise IndexMismatch(f"{self.folder}: one row twice in an answer; rebuild the index")
        order_N_K = np.lexsort((rows_N_K, -scores_N_K), axis=1)
        return np.take_along_axis(scores_N_K, order_N_K, 1), np.take_along_axis(rows_N_K, order_N_K, 1)

    def _load_on_gpus(self, faiss_kinds) -> None:
        faiss_kinds.require_gpu(self.manifest["kind"])
        gpus, free = faiss_kinds.free_gpu_memory()
        log.info("%s: %s", self.folder, plan_gpus(self.manifest, free, gpus).text())
        if free is None:
            log.warning("torch does not see the %d GPUs of FAISS: their free memory is not known", gpus)
        self._faiss = faiss_kinds.flat_on_gpus(self.vectors_M_D, gpus)


def _open_documents(folder: Path, manifest: dict) -> Documents:
    path = folder / "offsets.npy"
    try:
        offsets = np.load(path, mmap_mode="r", allow_pickle=False)
        size = (folder / "corpus.jsonl").stat().st_size
    except (OSError, ValueError, EOFError) as error:
        raise IndexMismatch(f"{path}: {error}; rebuild the index") from None
    values = {
        "offsets.npy: rows": (len(offsets) - 1 if offsets.ndim == 1 else offsets.shape, manifest["rows"]),
        "offsets.npy: dtype": (str(offsets.dtype), "int64"),
        "corpus.jsonl: bytes": (size, int(offsets.flat[-1]) if offsets.size else 0),
    }
    require_equal(folder, values)
    return Documents(folder / "corpus.jsonl", offsets)
