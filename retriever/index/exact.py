"""The encoded vectors of an index, in the one file that keeps them, and exact search over them. Needs no FAISS."""

import os
import struct
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from verl_credit_retriever.index.manifest import IndexMismatch, files_of, naming, require_equal

CHUNK_BYTES = 64 << 20  # limits the float32 vectors, and the scores over them, at a time
# FAISS writes a flat index as: code, dim (int32), rows (int64), ..., number of elements (uint64), vectors.
# An element is 4 bytes in an "IxFI" file (float32) and 1 byte in an "IxSQ" file (float16).
FAISS_CODES = {"float32": (b"IxFI", 4), "float16": (b"IxSQ", 1)}


class ExactSearch:
    """The k largest inner products of every query over all rows; equal scores come in order of their rows.

    `vectors_M_D` is float16 or float32 and may be a memory map: one chunk at a time is read, converted to float32
    and multiplied, and its best rows are merged into the best so far. This is the oracle for the approximate kinds
    and the backend where FAISS cannot be installed. Several threads may search at once.
    """

    def __init__(self, vectors_M_D: np.ndarray, *, chunk_rows: int | None = None):
        self._vectors_M_D = vectors_M_D
        self.rows, self.dim = vectors_M_D.shape
        self._chunk_rows = chunk_rows or max(1, CHUNK_BYTES // (4 * self.dim))

    def search(self, queries_N_D: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        """(scores float32 [N, K], rows int64 [N, K]), best first, K = min(k, rows).

        Errors: ValueError when a product is not finite, which only damaged vectors give.
        """
        k, count = min(k, self.rows), len(queries_N_D)
        scores_N_K = np.full((count, k), -np.inf, dtype=np.float32)
        rows_N_K = np.full((count, k), self.rows, dtype=np.int64)
        step = max(1, min(self._chunk_rows, CHUNK_BYTES // (4 * max(1, count))))
        for first in range(0, self.rows, step):
            chunk_C_D = self._vectors_M_D[first : first + step]
            # The vectors in a FAISS file start at any byte; BLAS needs them aligned.
            chunk_C_D = np.require(chunk_C_D, np.float32, ["C", "ALIGNED"])
            found_N_C = queries_N_D @ chunk_C_D.T
            if not np.isfinite(found_N_C).all():
                raise ValueError(f"rows {first} to {first + len(chunk_C_D) - 1} hold NaN or infinity")
            # A later row must beat the worst kept score: with an equal one the earlier row stays.
            better_N_C = found_N_C > scores_N_K[:, -1:]
            for query in np.flatnonzero(better_N_C.any(axis=1)):
                rows = np.flatnonzero(better_N_C[query])
                scores = found_N_C[query, rows]
                if len(rows) > k:  # keep the k best and all ties with them, which the merge then orders
                    kept = scores >= np.partition(scores, len(rows) - k)[len(rows) - k]
                    rows, scores = rows[kept], scores[kept]
                scores = np.concatenate([scores_N_K[query], scores])
                rows = np.concatenate([rows_N_K[query], rows + first])
                best = np.lexsort((rows, -scores))[:k]
                scores_N_K[query], rows_N_K[query] = scores[best], rows[best]
        return scores_N_K, rows_N_K

    def among(self, queries_N_D: np.ndarray, rows_N_C: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        """The k best of the rows given for each query (-1: none), as `search` would score them; -1 where too few are."""
        scores_N_K = np.full((len(queries_N_D), k), -np.inf, dtype=np.float32)
        rows_N_K = np.full((len(queries_N_D), k), -1, dtype=np.int64)
        for query, rows_C in enumerate(rows_N_C):
            rows = np.unique(rows_C[rows_C >= 0])  # in the order of the file, which may be on disk
            scores = self._vectors_M_D[rows].astype(np.float32) @ queries_N_D[query]
            best = np.lexsort((rows, -scores))[:k]
            scores_N_K[query, : len(best)], rows_N_K[query, : len(best)] = scores[best], rows[best]
        return scores_N_K, rows_N_K


def write_array(path: Path, blocks: Iterable[np.ndarray], shape: tuple[int, ...], dtype: str) -> None:
    """Write a .npy file, a block at a time. `np.save` raises nothing when its last bytes do not fit on the disk."""
    header = {"descr": np.dtype(dtype).str, "fortran_order": False, "shape": shape}
    with naming(path), open(path, "wb") as file:
        np.lib.format.write_array_header_1_0(file, header)
        for block in blocks:
            file.write(np.ascontiguousarray(block, dtype=dtype).data)


def open_vectors(folder: Path, manifest: dict) -> np.ndarray:
    """The vectors of an index, [rows, dim] in its dtype: a read-only memory map that processes share.

    Needs no FAISS: a flat index file ends with its vectors. Errors: IndexMismatch when the file's shape or
    type is not the manifest's.
    """
    if "vectors.npy" not in files_of(manifest["kind"]):
        return _end_of_faiss_file(folder / "index.faiss", manifest)
    path = folder / "vectors.npy"
    try:
        vectors = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, OSError, EOFError) as error:
        raise IndexMismatch(f"{path}: {error}; rebuild the index") from None
    expected = (manifest["rows"], manifest["dim"], manifest["dtype"])
    require_equal(path, {"shape and dtype": ((*vectors.shape, str(vectors.dtype)), expected)})
    return vectors


def _end_of_faiss_file(path: Path, manifest: dict) -> np.ndarray:
    rows, dim, dtype = manifest["rows"], manifest["dim"], manifest["dtype"]
    code, unit = FAISS_CODES[dtype]
    size = rows * dim * np.dtype(dtype).itemsize
    try:
        start = os.path.getsize(path) - size
        with open(path, "rb") as file:
            found_code, found_dim, found_rows = struct.unpack("<4siq", file.read(16))
            file.seek(max(0, start - 8))
            (elements,) = struct.unpack("<Q", file.read(8))
    except (OSError, struct.error) as error:
        raise IndexMismatch(f"{path}: {error}; rebuild the index") from None
    compared = {"dim": (found_dim, dim), "rows": (found_rows, rows), "code": (found_code, code)}
    compared["elements"] = (elements * unit, size)
    require_equal(path, compared)
    return np.memmap(path, dtype=dtype, mode="r", offset=start, shape=(rows, dim))
