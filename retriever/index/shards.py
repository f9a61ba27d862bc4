"""Encoded vectors in shard files, which an interrupted build can use again."""

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from verl_credit_retriever.index.corpus import Documents
from verl_credit_retriever.index.manifest import sha256, write_whole

PLAN = "settings.json"


class BuildRefused(ValueError):
    """Another build of the index is running, or an interrupted one has other settings or lines."""


def can_resume(work: Path, settings: dict, *, overwrite: bool) -> bool:
    """Returns whether `work` holds an interrupted build with these settings. Changes nothing.

    The bits of the vectors depend on `settings`. Errors: BuildRefused names the settings that differ, unless `overwrite`
    allows to start anew.
    """
    if not (work / PLAN).is_file():
        return False
    before = _read_json(work / PLAN)
    keys = [key for key in {**before, **settings} if before.get(key) != settings.get(key)]
    if keys and not overwrite:
        differing = ", ".join(f"{key}={settings.get(key)!r} (was {before.get(key)!r})" for key in keys)
        raise BuildRefused(
            f"{work} holds an interrupted build with other settings: {differing}; "
            "repeat its command to finish it, or pass overwrite to start anew"
        )
    return not keys


def start_over(work: Path, settings: dict, *, keep: Path) -> None:
    """Empty the work folder except for `keep`, and record the settings of the new build."""
    for path in work.glob("shard-*"):
        path.unlink()
    for path in work.iterdir():
        if path.name not in (PLAN, keep.name):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    # The settings come last, so that shards never stand beside those of another build.
    write_whole(work / PLAN, json.dumps(settings, indent=2).encode())


class Shards:
    """The shard files of `work`: shard s holds the vectors of rows s·shard_rows to (s + 1)·shard_rows - 1.

    A shard is two files: raw vectors, and a JSON written after them with the hashes of the vectors and of their corpus
    lines. Vectors without the JSON, or with another hash, are encoded again.
    """

    def __init__(self, work: Path, documents: Documents, shard_rows: int, dim: int, dtype: str):
        self._work, self._documents, self._shard_rows = work, documents, shard_rows
        self._dim, self._dtype = dim, np.dtype(dtype)
        self.row_bytes = dim * self._dtype.itemsize
        self.rows = len(documents)
        self.count = -(-self.rows // shard_rows)
        self._done: set[int] = set()

    def find_done(self, *, overwrite: bool) -> int:
        """Check the shards that are there; returns how many rows are encoded.

        Errors: BuildRefused for a file that is no shard's, and when lines of a finished shard were changed or deleted;
        with `overwrite` that shard is encoded again instead.
        """
        for path in sorted(self._work.glob("shard-*.json")):
            number = path.stem.removeprefix("shard-")
            if not (number.isascii() and number.isdigit()):
                raise BuildRefused(f"{path} is no shard of this build; remove it")
            shard, record = int(number), _read_json(path)
            if not record.keys() >= {"rows", "corpus_sha256", "vectors_sha256"}:
                continue  # damaged: this shard is encoded again
            first, last = self._range(shard)
            if shard < self.count and record["rows"] < last - first:
                continue  # as the last shard, to which lines were added since
            same = (
                shard < self.count
                and record["rows"] == last - first
                and record["corpus_sha256"] == self._documents.sha256(first, last)
            )
            if not same and not overwrite:
                raise BuildRefused(
                    f"{self._work}: the corpus has changed in rows {first} to {first + record['rows'] - 1} since "
                    "the interrupted build; restore it, or pass overwrite to encode these rows anew"
                )
            file = self._file(shard)
            if same and file.is_file() and sha256(file) == record["vectors_sha256"]:
                self._done.add(shard)
        return sum(last - first for first, last in map(self._range, self._done))

    def missing(self) -> list[int]:
        """Returns the shards that are not done."""
        return [shard for shard in range(self.count) if shard not in self._done]

    def encode(self, shard: int, encode: Callable[[list[str]], np.ndarray], chunk_rows: int, on_rows) -> None:
        """Encode a shard and write it; `on_rows(rows encoded)` after each chunk of texts."""
        (first, last), file = self._range(shard), self._file(shard)
        chunks = []
        for start in range(first, last, chunk_rows):
            rows = range(start, min(start + chunk_rows, last))
            chunks.append(self._checked(encode([self._documents[row]["contents"] for row in rows]), rows))
            on_rows(len(rows))
        content = np.concatenate(chunks).tobytes()
        write_whole(file, content)
        record = {
            "rows": last - first,
            "corpus_sha256": self._documents.sha256(first, last),
            "vectors_sha256": hashlib.sha256(content).hexdigest(),
        }
        write_whole(file.with_suffix(".json"), json.dumps(record).encode())

    def blocks(self) -> Iterator[np.ndarray]:
        """The vectors of every shard in order, [rows of the shard, D], memory-mapped."""
        for shard in range(self.count):
            first, last = self._range(shard)
            shape = (last - first, self._dim)
            yield np.memmap(self._file(shard), dtype=self._dtype, mode="r", shape=shape)

    def take(self, rows: np.ndarray) -> np.ndarray:
        """The vectors of these rows, given in ascending order."""
        parts, first = [], 0
        for block in self.blocks():
            here = rows[(rows >= first) & (rows < first + len(block))] - first
            parts.append(np.array(block[here]))
            first += len(block)
        return np.concatenate(parts)

    def _checked(self, vectors_C_D: np.ndarray, rows: range) -> np.ndarray:
        stored_C_D = np.asarray(vectors_C_D).astype(self._dtype)
        if stored_C_D.shape != (right := (len(rows), self._dim)):
            raise ValueError(f"the encoder gave vectors of shape {stored_C_D.shape}; expected {right}")
        bad = np.flatnonzero(~np.isfinite(stored_C_D).all(axis=1))
        if bad.size:
            raise ValueError(f"row {rows[bad[0]]}: the vector is not finite in {self._dtype}")
        return stored_C_D

    def _range(self, shard: int) -> tuple[int, int]:
        first = shard * self._shard_rows
        return first, min(first + self._shard_rows, self.rows)

    def _file(self, shard: int) -> Path:
        return self._work / f"shard-{shard:06}.vectors"


def _read_json(path: Path) -> dict:
    try:
        value = json.loads(path.read_text())
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}
