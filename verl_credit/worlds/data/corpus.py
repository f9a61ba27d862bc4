"""Writes the paragraphs of the questions as a corpus for `verl-credit-retriever index`."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path

from verl_credit.worlds.data.records import is_text


class CorpusWriter:
    """Writes every paragraph once, in the order of the questions: ``{"id", "contents": "Title\\ntext"}`` per line.

    Paragraphs are the same when title and text are equal. Only digests are kept in memory. The first paragraph creates
    ``path``.
    """

    def __init__(self, path: Path):
        self.path, self.written, self.repeated, self.unusable = path, 0, 0, 0
        self._seen: set[bytes] = set()
        self._file = None

    def add(self, paragraphs: Iterable[tuple[str, str]]) -> None:
        for title, text in paragraphs:
            if not _usable(title) or not _usable(text):
                self.unusable += 1
                continue
            contents = f"{' '.join(title.split())}\n{text.strip()}"
            digest = hashlib.blake2b(contents.encode(), digest_size=16).digest()
            if digest in self._seen:
                self.repeated += 1
                continue
            self._seen.add(digest)
            if self._file is None:
                self._file = self.path.open("w", encoding="utf-8")
            row = {"id": str(self.written), "contents": contents}
            self._file.write(json.dumps(row, ensure_ascii=False) + "\n")
            self.written += 1

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


def _usable(value) -> bool:
    return isinstance(value, str) and bool(value.strip()) and is_text(value)
