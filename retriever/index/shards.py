"""Encoded vectors in shard files, which an interrupted build can use again."""

import hashlib
import json
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np

from verl_credit_retriever.index.corpus import Documents
from verl_credit_retriever.index.manifest import sha256, write_whole

PLAN = "settings.json"


class BuildRefused(ValueError):
    """Another build of the index is running, or an interrupted one has other settings or lines."""


def can_resume(work: Path, settings: dict, *, overwrite: bool | None) -> bool:
    """Returns whether `work` holds an interrupted build with these settings. Changes nothing.

    The bits of the vectors depend on `settings`. Shards without the folder's settings were copied from other machines:
    they have their own, which `find_done` compares. Errors: BuildRefused names the settings that differ, unless
    `overwrite` allows to start anew (None: a share or a merge, which replaces nothing).
    """
    plan = work / PLAN
    if not plan.is_file():
        return any(work.glob("shard-*.json"))
    differing = _differing(settings, _read_json(plan))
    if differing and not overwrite:
        raise BuildRefused(
            f"{work} holds an interrupted build with other settings: {differing}; "
            f"repeat its command to finish it{_or_overwrite(overwrite, 'start anew')}"
        )
    return not differing


def begin(work: Path, settings: dict) -> None:
    """Record the settings of the build in its work folder."""
    write_whole(work / PLAN, json.dumps(settings, indent=2).encode())


def start_over(work: Path, settings: dict, *, keep: Path) -> None:
    """Empty the work folder except for `keep`, and record the settings of the new build."""
    for path in work.glob("shard-*"):
        path.unlink()
    for path in work.iterdir():
        if path.name not in (PLAN, keep.name):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    begin(work, settings)  # last, so that shards never stand beside the settings of another build


class Shards:
    """The shard files of `work`: shard s holds the vectors of rows s·shard_rows to (s + 1)·shard_rows - 1.

    A shard is two files: raw vectors, and a JSON written after them with the build's settings and the hashes of the
    vectors and of their corpus lines. Vectors without the JSON, or with another hash, are encoded again. `share` (i, n)
    is every n-th shard from the i-th on (from 1): the part of one of n machines.
    """

    def __init__(
        self,
        work: Path,
        documents: Documents,
        *,
        shard_rows: int,
        dim: int,
        dtype: str,
        settings: dict,
        share: tuple[int, int] = (1, 1),
    ):
        self.work, self._documents, self._shard_rows = work, documents, shard_rows
        self._dim, self._dtype, self._settings = dim, np.dtype(dtype), settings
        self.row_bytes = dim * self._dtype.itemsize
        self.all_rows = len(documents)
        self.count = -(-self.all_rows // shard_rows)
        self._share = range(share[0] - 1, self.count, share[1])
        self.rows = self._rows_of(self._share)
        self._done: set[int] = set()

    def find_done(self, *, overwrite: bool | None) -> int:
        """Check the share's shards that are there; returns how many rows are encoded.

        Errors: BuildRefused when lines of a finished shard were changed or deleted, or it was encoded with other
        settings; with `overwrite` that shard is encoded again instead.
        """
        for path in sorted(self.work.glob("shard-*.json")):
            shard = int(path.stem.split("-")[1])
            record = _read_json(path)
            if shard < self.count and shard not in self._share:
                continue
            if not record.keys() >= {"rows", "corpus_sha256", "vectors_sha256", "settings"}:
                continue  # damaged: this shard is encoded again
            differing = _differing(self._settings, record["settings"])
            if differing and not overwrite:
                raise BuildRefused(
                    f"{path} was encoded with other settings: {differing}; remove it"
                    f"{_or_overwrite(overwrite, 'encode it anew')}"
                )
            first, last = self._range(shard)
            if differing or (shard < self.count and record["rows"] < last - first):
                continue  # as the last shard, to which lines were added since
            same = (
                shard < self.count
                and record["rows"] == last - first
                and record["corpus_sha256"] == self._documents.sha256(first, last)
            )
            if not same and not overwrite:
                raise BuildRefused(
                    f"{self.work}: the corpus has changed in rows {first} to {first + record['rows'] - 1} since "
                    f"the interrupted build; restore it{_or_overwrite(overwrite, 'encode these rows anew')}"
                )
            file = self._file(shard)
            if same and file.is_file() and sha256(file) == record["vectors_sha256"]:
                self._done.add(shard)
        return self._rows_of(self._done)

    def missing(self) -> list[int]:
        """The share's shards that are not done."""
        return [shard for shard in self._share if shard not in self._done]

    def require_all(self) -> None:
        """Errors: BuildRefused names the shards that are not done."""
        if missing := self.missing():
            named = ", ".join(self._file(shard).stem for shard in missing[:5])
            more = f" and {len(missing) - 5} more" if len(missing) > 5 else ""
            raise BuildRefused(
                f"{self.work}: {len(missing)} of {self.count} shards are missing or damaged: {named}{more}; encode "
                "them with --shard, or leave out --merge to encode them here"
            )

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
            "settings": self._settings,
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

    def _rows_of(self, shards: Iterable[int]) -> int:
        return sum(last - first for first, last in map(self._range, shards))

    def _range(self, shard: int) -> tuple[int, int]:
        first = shard * self._shard_rows
        return first, min(first + self._shard_rows, self.all_rows)

    def _file(self, shard: int) -> Path:
        return self.work / f"shard-{shard:06}.vectors"


def _or_overwrite(overwrite: bool | None, to: str) -> str:
    """How a refusal goes on, where overwrite helps and where it does not."""
    if overwrite is None:
        return " (overwrite replaces no shards with --shard or --merge)"
    return f", or pass overwrite to {to}"


def _differing(now: dict, before: dict) -> str:
    """The settings that differ, with both values; "" for none."""
    keys = [key for key in {**before, **now} if before.get(key) != now.get(key)]
    return ", ".join(f"{key}={now.get(key)!r} (was {before.get(key)!r})" for key in keys)


def _read_json(path: Path) -> dict:
    try:
        value = json.loads(path.read_text())
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}
