"""Reads the records of a file: JSON, JSON lines, tables with a header, parquet."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from verl_credit.worlds.data.records import PrepareError

SUFFIXES = (".json", ".jsonl", ".csv", ".tsv", ".parquet")


@dataclass(frozen=True)
class Item:
    """A record and its place in the file; ``problem`` is the reason why it could not be read (then ``raw`` is None)."""

    where: str
    raw: object
    problem: str = ""


def items_of(path: Path) -> Iterator[Item]:
    """The records of a file. Raises PrepareError when the whole file cannot be read."""
    try:
        if path.suffix == ".parquet":
            yield from _parquet(path)
        elif path.suffix in (".csv", ".tsv"):
            yield from _table(path, "\t" if path.suffix == ".tsv" else ",")
        elif path.suffix == ".json":
            yield from _json(path)
        else:
            yield from _lines(path)
    except OSError as error:
        raise PrepareError(f"{path} cannot be read: {error}") from error


def _lines(path: Path) -> Iterator[Item]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                yield _parsed(line, f"{path.name} line {number}")


def _parsed(line: bytes, where: str) -> Item:
    try:
        return Item(where, json.loads(line.decode("utf-8-sig")))
    except (ValueError, RecursionError) as error:  # JSON and UTF-8 errors are ValueErrors
        return Item(where, None, f"not JSON ({error}): {line[:60]!r}")


def _json(path: Path) -> Iterator[Item]:
    """A list, an object that contains one (TriviaQA's "Data"), one record, or JSON lines in a .json file."""
    content = path.read_bytes()
    try:
        whole = json.loads(content.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        if not content.lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"{"):
            raise PrepareError(f"{path} is not JSON: {error}") from None
        yield from _lines(path)
        return
    if isinstance(whole, Mapping):
        records = next((whole[key] for key in ("Data", "data") if isinstance(whole.get(key), list)), None)
        whole = [whole] if records is None else records
    if not isinstance(whole, list):
        raise PrepareError(f"{path} holds {whole!r:.80}; expected a list of records")
    for number, raw in enumerate(whole):
        yield Item(f"{path.name} record {number}", raw)


def _table(path: Path, delimiter: str) -> Iterator[Item]:
    with path.open(encoding="utf-8-sig", newline="") as file:
        rows = csv.DictReader(file, delimiter=delimiter)
        try:
            for row in rows:
                extra = row.pop(None, None)
                where = f"{path.name} line {rows.line_num}"
                problem = f"{len(extra)} more cells than the header" if extra else ""
                yield Item(where, None if problem else row, problem)
        except (csv.Error, UnicodeDecodeError) as error:
            raise PrepareError(f"{path} line {rows.line_num + 1} cannot be read: {error}") from error


def _parquet(path: Path) -> Iterator[Item]:
    import pyarrow
    import pyarrow.parquet as parquet

    try:
        with parquet.ParquetFile(path) as file:
            number = 0
            for batch in file.iter_batches(batch_size=1000):
                for raw in batch.to_pylist():
                    yield Item(f"{path.name} record {number}", raw)
                    number += 1
    except pyarrow.ArrowException as error:
        raise PrepareError(f"{path} is not a parquet file: {error}") from error
