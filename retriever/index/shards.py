"""Encoded vectors in shard files, which an interrupted build can use again."""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from verl_credit_retriever.index.corpus import Documents
from verl_credit_retriever.index.manifest import sha256

PLAN = "settings.json"


class BuildRefused(ValueError):
    """Another build of the index is running, or an interrupted one has other settings or lines."""


def can_resume(work: Path, settings: dict, *, overwrite: bool) -> bool:
    """Whether `work` holds an interrupted build with these settings. Changes nothing.

    The bits of the vectors depend on `settings`. Errors: BuildRefused names the settings that differ, unless
    `overwrite` allows to start anew.
    """
    plan = work / PLAN
    if not plan.is_file():
        return False
    before = _read_json(plan)
    differing = [key for key in {**before, **settings} if before.get(key) != settings.get(key)]
    if differing and not overwrite:
        found = ", ".join(f"{key}={settings.get(key)!r} (was {before.get(key)!r})" for key in differing)
        raise BuildRefused(
            f"{work} holds an interrupted build with other settings: {found}; "
            "repeat its command to finish it, or pass overwrite to start anew"
        )
    return not differing


def start_over(work: Path, settings: dict, *, keep: Path) -> None:
    """Empty the work folder except for `keep`, and record the settings of the new build."""
    for path in work.glob("shard-*"):
        path.unlink()
    for path in work.iterdir():
        if path.name not in (PLAN, keep.name):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    # Last, so that shards never stand beside the settings of another build.
    _write_whole(work / PLAN, json.dumps(settings, indent=2).encode())


def size_of_shards(work: Path) -> int:
    """Bytes of the vectors that an interrupted build left."""
    return sum(path.stat().st_size for path in work.glob("shard-*.vectors"))


class Shards:
    """The shard files of `work`: shard s holds the vectors of rows s·shard_rows to (s + 1)·shard_rows - 1.

    A shard is two files: raw vectors, and a JSON written after them with the hashes of the vectors and of their
    corpus lines. Vectors without the JSON, or with another hash, are encoded again.
    """

    def __init__(self, work: Path, documents: Documents, *, shard_rows: int, dim: int, dtype: str):
        self.work, self._documents, self._shard_rows = work, documents, shard_rows
        self._dim, self._dtype = dim, np.dtype(dtype)
        self.rows = len(documents)
        self.count = -(-self.rows // shard_rows)
        self._done = [False] * self.count

    def find_done(self, *, overwrite: bool) -> int:
        """Check the shards of an interrupted build; returns how many rows are encoded.

        Errors: BuildRefused when lines of a finished shard were changed or deleted; with `overwrite` that shard is
        encoded again instead.
        """
        for path in sorted(self.work.glob("shard-*.json")):
            shard = int(path.stem.split("-")[1])
            record = _read_json(path)
            if not record.keys() >= {"rows", "corpus_sha256", "vectors_sha256"}:
                continue  # damaged: this shard is encoded again
            first, last = self._range(shard)
            if shard < self.count and record["rows"] < last - first:
                continue  # this was the last shard, and lines were added since
            same = (
                shard < self.count
                and record["rows"] == last - first
                and record["corpus_sha256"] == self._documents.sha256(first, last)
            )
            if not same and not overwrite:
                raise BuildRefused(
                    f"{self.work}: the corpus has changed in rows {first} to {first + record['rows'] - 1} since "
                    "the interrupted build; restore it, or pass overwrite to encode these rows anew"
                )
            if same:
                file = self._file(shard)
                self._done[shard] = file.is_file() and sha256(file) == record["vectors_sha256"]
        done = (self._range(shard) for shard in range(self.count) if self._done[shard])
        return sum(last - first for first, last in done)

    def encode_missing(self, encode: Callable[[list[str]], np.ndarray], chunk_rows: int, on_rows) -> None:
        """Encode every shard that is not done; `on_rows(rows encoded)` after each chunk of texts."""
        for shard in range(self.count):
            if self._done[shard]:
                continue
            first, last = self._range(shard)
            chunks = []
            for start in range(first, last, chunk_rows):
                rows = range(start, min(start + chunk_rows, last))
                chunks.append(self._checked(encode([self._documents[row]["contents"] for row in rows]), rows))
                on_rows(len(rows))
            self._write(shard, np.concatenate(chunks))

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
        if stored_C_D.shape != (len(rows), self._dim):
            raise ValueError(
                f"the encoder gave shape {stored_C_D.shape} for {len(rows)} texts; expected {(len(rows), self._dim)}"
            )
        bad = np.flatnonzero(~np.isfinite(stored_C_D).all(axis=1))
        if bad.size:
            raise ValueError(f"row {rows[bad[0]]}: the vector is not finite in {self._dtype}")
        return stored_C_D

    def _write(self, shard: int, vectors: np.ndarray) -> None:
        first, last = self._range(shard)
        content = vectors.tobytes()
        _write_whole(self._file(shard), content)
        record = {
            "rows": last - first,
            "corpus_sha256": self._documents.sha256(first, last),
            "vectors_sha256": hashlib.sha256(content).hexdigest(),
        }
        _write_whole(self._file(shard).with_suffix(".json"), json.dumps(record).encode())
        self._done[shard] = True

    def _range(self, shard: int) -> tuple[int, int]:
        first = shard * self._shard_rows
        return first, min(first + self._shard_rows, self.rows)

    def _file(self, shard: int) -> Path:
        return self.work / f"shard-{shard:06}.vectors"


def _write_whole(path: Path, content: bytes) -> None:
    """Write a file so that it is complete or absent."""
    temporary = path.with_name(f"{path.name}.tmp")
    with open(temporary, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def _read_json(path: Path) -> dict:
    try:
        found = json.loads(path.read_text())
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
