"""The encoded vectors of an index, memory-mapped from the one file that keeps them."""

import os
import struct
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from verl_credit_retriever.index.manifest import IndexMismatch, files_of

# FAISS writes a flat index as: code, dim (int32), rows (int64), ..., number of elements (uint64), vectors.
# An element is 4 bytes in an "IxFI" file (float32) and 1 byte in an "IxSQ" file (float16).
FAISS_CODES = {"float32": (b"IxFI", 4), "float16": (b"IxSQ", 1)}


def write_vectors(path: Path, blocks: Iterable[np.ndarray], *, rows: int, dim: int, dtype: str) -> None:
    """Write [rows, dim] vectors as a .npy file, a block at a time."""
    header = {"descr": np.dtype(dtype).str, "fortran_order": False, "shape": (rows, dim)}
    with open(path, "wb") as file:
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
    if (*vectors.shape, str(vectors.dtype)) != expected:
        raise IndexMismatch(
            f"{path}: shape and dtype={(*vectors.shape, str(vectors.dtype))}; expected {expected}; rebuild"
        )
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
    found = {"dim": (found_dim, dim), "rows": (found_rows, rows), "code": (found_code, code)}
    found["elements"] = (elements * unit, size)
    for what, (value, right) in found.items():
        if value != right:
            raise IndexMismatch(f"{path}: {what}={value!r}; expected {right!r}; rebuild the index")
    return np.memmap(path, dtype=dtype, mode="r", offset=start, shape=(rows, dim))
