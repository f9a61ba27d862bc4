"""A corpus is a JSONL file: one {"id": str, "contents": "Title\\ntext"} per line, ids unique.

A line with "title" and "text" in the place of "contents" is read as such a one, and "_id" (BEIR) or "docid" as "id". Ids
may be whole numbers; where no line has one, ids are the numbers of the rows from 0 on. DPR's psgs_w100.tsv, whose first
line is "id, text, title", is copied as JSONL.
"""

import csv
import hashlib
import json
import os
import re
import shutil
import weakref
from array import array
from pathlib import Path

import numpy as np

from verl_credit_retriever.foreign import what_it_is
from verl_credit_retriever.index.exact import write_array
from verl_credit_retriever.index.manifest import naming
from verl_credit_retriever.index.memory import require_disk

VISIBLE = re.compile("[^\\s\u200b-\u200d\u2060\ufeff]")  # neither a blank nor a character without width
BOM = b"\xef\xbb\xbf"
IDS = ("id", "_id", "docid")
TSV_HEADER = b"id\ttext\ttitle"
EXPECTED = 'expected {"id": ..., "contents": ...} on every line, or a TSV whose first line is id, text, title'


class CorpusError(ValueError):
    """A corpus that cannot be indexed; the message names the file and the line."""


def parse_line(line: bytes, where: str, row: int) -> dict:
    """Returns a corpus line as {"id", "contents"}, with its "url" if that is a text, and without other fields.

    The number `row` is the id of a line without one. Errors: CorpusError with `where`.
    """
    return _document(_fields(line, where), where, row)


def _fields(line: bytes, where: str, hook=None) -> dict:
    try:
        fields = json.loads(line.decode("utf-8"), object_pairs_hook=hook)
    except UnicodeDecodeError as error:
        raise CorpusError(f"{where}: not UTF-8 (byte {error.start})") from None
    except (ValueError, RecursionError) as error:
        raise CorpusError(f"{where}: not JSON ({error}): {line[:80]!r}; {EXPECTED}") from None
    if not isinstance(fields, dict):
        raise CorpusError(f"{where}: {line[:80]!r} is not an object; {EXPECTED}")
    return fields


def _document(fields: dict, where: str, row: int) -> dict:
    name = _id(fields)
    name = row if name is None else name
    document = {"id": str(name) if type(name) is int else name, "contents": _contents(fields)}
    for key, value in document.items():
        if not isinstance(value, str) or not value.strip():
            more = " or a whole number"
            if key == "contents":
                more = f", or title and text; the line has {', '.join(fields)[:200] or 'nothing'}"
            raise CorpusError(f"{where}: {key}={value!r}; expected a non-empty string{more}")
        try:
            value.encode("utf-8")
        except UnicodeEncodeError:
            raise CorpusError(f"{where}: {key} holds a lone surrogate, which is not text") from None
    if isinstance(url := fields.get("url"), str):
        document["url"] = url.encode("utf-8", "replace").decode()
    return document


def _id(fields: dict):
    return next((fields[key] for key in IDS if fields.get(key) is not None), None)


def _contents(row: dict):
    """The title in the first line, the text in the others; the text alone where the title is empty."""
    title, text = row.get("title") or "", row.get("text")
    if row.get("contents") is not None or not (isinstance(title, str) and isinstance(text, str)):
        return row.get("contents")
    return f"{' '.join(title.split())}\n{text}" if title.strip() and text.strip() else text


def _once(pairs: list[tuple[str, object]]) -> dict:
    row = dict(pairs)
    if len(row) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(name for name in row if names.count(name) > 1)[:40]!r} occurs twice")
    return row


def _from_tsv(line: bytes, where: str) -> bytes:
    """A line of DPR's psgs_w100.tsv as one of JSONL."""
    try:
        ((name, text, title),) = csv.reader(
            [line.decode("utf-8").rstrip("\r\n")], delimiter="\t", strict=True
        )
    except (ValueError, csv.Error) as error:
        raise CorpusError(f"{where}: not id, text, title as csv writes them with tabs ({error})") from None
    return json.dumps({"id": name, "title": title, "text": text}, ensure_ascii=False).encode() + b"\n"


def copy_corpus(source: Path, target: Path) -> np.ndarray:
    """Check every line of `source`, copy it to `target`, and return the offsets that `Documents` takes.

    This one pass comes before the encoding, so that a bad line is refused within minutes and not after hours. It takes 16
    bytes of memory per row: rows with equal 64-bit hashes of their ids are compared by the ids. A byte order mark at
    the start and one blank line at the end are left out of the copy.
    Errors: CorpusError for a file of another format, bad JSON, a missing or empty field, a duplicate id (both lines are
    named), an id in some lines only, no row.
    """
    if what := what_it_is(source):
        raise CorpusError(f"{source}: {what}; expected a JSONL file")
    hashes, ends, named, tsv = array("Q"), array("q", [0]), None, False
    with naming(target), open(source, "rb") as lines, open(target, "wb") as copy:
        for number, line in enumerate(lines, start=1):
            where = f"{source}:{number}"
            if number == 1:
                line = line.removeprefix(BOM)
                if tsv := line.strip() == TSV_HEADER:
                    continue
            elif not line.strip() and not lines.peek(1):
                break  # editors leave a blank line at the end
            line = _from_tsv(line, where) if tsv else line
            fields = _fields(line, where, _once)
            if named not in (None, here := _id(fields) is not None):
                says = "an id, and the first line has none" if here else "no id, and the first line has one"
                raise CorpusError(f"{where}: {says}; give it to all lines or to none")
            named = here
            row = _document(fields, where, len(hashes))
            for key, value in row.items():
                # Documents are not checked for this: an older index may hold such a document, and has to answer.
                if not VISIBLE.search(value) and key != "url":
                    raise CorpusError(f"{where}: {key}={value!r}; expected a non-empty string")
            identity = row["id"].encode()
            hashes.append(int.from_bytes(hashlib.blake2b(identity, digest_size=8).digest(), "little"))
            ends.append(ends[-1] + copy.write(line))
    if not hashes:
        raise CorpusError(f"{source}: no rows; expected at least one document")
    offsets = np.array(ends, dtype=np.int64)
    hashed = np.frombuffer(hashes, dtype=np.uint64)
    order = np.argsort(hashed, kind="stable")
    meets = hashed[order[1:]] == hashed[order[:-1]]
    first_row, documents = {}, Documents(target, offsets)
    for row in np.unique(np.concatenate([order[1:][meets], order[:-1][meets]])).tolist():
        identity = documents[row]["id"]
        first = first_row.setdefault(identity, row)
        if first != row:
            raise CorpusError(
                f"{source}:{row + 1 + tsv}: id={identity!r} was used on line {first + 1 + tsv}; ids must be unique"
            )
    return offsets


def take_corpus(corpus: Path, stage: Path) -> "Documents":
    """Check the corpus and copy it to the new folder `stage`."""
    shutil.rmtree(stage, ignore_errors=True)
    stage.mkdir(parents=True)
    require_disk(stage, corpus.stat().st_size, "the copy of the corpus")
    offsets = copy_corpus(corpus, stage / "corpus.jsonl")
    write_array(stage / "offsets.npy", [offsets], offsets.shape, "int64")
    return Documents(stage / "corpus.jsonl", offsets)


class Documents:
    """Rows of a corpus file by number, read from disk on demand.

    `offsets` has rows + 1 entries: row r is the bytes offsets[r] to offsets[r + 1]. Several threads may read at the
    same time, because positional reads share no file position.
    """

    def __init__(self, path: Path, offsets: np.ndarray):
        self._path, self._offsets = path, offsets
        self._descriptor = os.open(path, os.O_RDONLY)
        weakref.finalize(self, os.close, self._descriptor)

    def __reduce__(self):
        return Documents, (self._path, self._offsets)  # another process opens the file itself

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def __getitem__(self, row: int) -> dict:
        if not 0 <= row < len(self):
            raise IndexError(f"row={row}; {self._path} has rows 0 to {len(self) - 1}")
        start, end = int(self._offsets[row]), int(self._offsets[row + 1])
        return parse_line(os.pread(self._descriptor, end - start, start), f"{self._path}:{row + 1}", row)

    def sha256(self, first: int, last: int) -> str:
        """Hex digest of the bytes of rows first to last - 1."""
        digest, position, end = hashlib.sha256(), int(self._offsets[first]), int(self._offsets[last])
        while position < end:
            block = os.pread(self._descriptor, min(1 << 20, end - position), position)
            if not block:
                raise CorpusError(f"{self._path}: ends at byte {position}; expected {end}")
            digest.update(block)
            position += len(block)
        return digest.hexdigest()
