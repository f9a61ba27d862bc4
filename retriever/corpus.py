"""A corpus is a JSONL file: one {"id": str, "contents": "Title\\ntext"} per line, ids unique."""

import json
import os
import weakref
from collections.abc import Iterator
from pathlib import Path

import numpy as np


class CorpusError(ValueError):
    """A corpus that cannot be indexed; the message names the file and the line."""


def parse_line(line: bytes, where: str) -> dict:
    """One corpus line as {"id", "contents"}; other fields are dropped. Errors: CorpusError with `where`."""
    try:
        row = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise CorpusError(f"{where}: not UTF-8 (byte {error.start})") from None
    except ValueError as error:
        raise CorpusError(f"{where}: not JSON ({error}): {line[:80]!r}") from None
    if not isinstance(row, dict):
        raise CorpusError(f'{where}: {line[:80]!r} is not an object; expected {{"id": ..., "contents": ...}}')
    for key in ("id", "contents"):
        value = row.get(key)
        if not isinstance(value, str) or not value.strip():
            raise CorpusError(f"{where}: {key}={value!r}; expected a non-empty string")
        try:
            value.encode("utf-8")
        except UnicodeEncodeError:
            raise CorpusError(f"{where}: {key} holds a lone surrogate, which is not text") from None
    return {"id": row["id"], "contents": row["contents"]}


def read_corpus(path: Path) -> Iterator[tuple[bytes, dict]]:
    """Stream (line as bytes, document); the corpus is checked on the way and never held in memory.

    Errors: CorpusError for bad JSON, a missing or empty field, a duplicate id (both lines are named), no row.
    """
    line_of_id: dict[str, int] = {}
    with open(path, "rb") as handle:
        for number, line in enumerate(handle, start=1):
            document = parse_line(line, f"{path}:{number}")
            first = line_of_id.setdefault(document["id"], number)
            if first != number:
                raise CorpusError(
                    f"{path}:{number}: id={document['id']!r} was used on line {first}; ids must be unique"
                )
            yield line, document
    if not line_of_id:
        raise CorpusError(f"{path}: no rows; expected at least one document")


class Documents:
    """Rows of a corpus file by number, read from disk on demand.

    `offsets` has rows + 1 entries: row r is the bytes offsets[r] to offsets[r + 1]. Positional reads keep no
    file position, so threads may read at the same time.
    """

    def __init__(self, path: Path, offsets: np.ndarray):
        self._path, self._offsets = path, offsets
        self._descriptor = os.open(path, os.O_RDONLY)
        weakref.finalize(self, os.close, self._descriptor)

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def __getitem__(self, row: int) -> dict:
        if not 0 <= row < len(self):
            raise IndexError(f"row={row}; {self._path} has rows 0 to {len(self) - 1}")
        start, end = int(self._offsets[row]), int(self._offsets[row + 1])
        return parse_line(os.pread(self._descriptor, end - start, start), f"{self._path}:{row + 1}")
