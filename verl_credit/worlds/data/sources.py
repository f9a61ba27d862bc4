"""The sources of records: files (JSON, JSON lines, tables with a header, parquet), a folder of files, or the Hugging Face
hub."""

from __future__ import annotations

import csv
import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from verl_credit.built_folder import sha256_of
from verl_credit.worlds.data.catalogue import DataSet
from verl_credit.worlds.data.records import PrepareError

SUFFIXES = (".json", ".jsonl", ".csv", ".tsv", ".parquet")
SPLITS = ("train", "val", "test")
SPLIT_WORDS = {"train": "train", "test": "test"} | dict.fromkeys(("dev", "val", "valid", "validation"), "val")
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


@dataclass(frozen=True)
class Item:
    """A record and its place in the file; ``problem`` is the reason why it could not be read (then ``raw`` is None)."""

    where: str
    raw: object
    problem: str = ""


def items_of(path: Path) -> Iterator[Item]:
    """The records of a file. Raises PrepareError when the whole file cannot be read."""
    read = {".parquet": _parquet, ".csv": _table, ".tsv": _table, ".json": _json}.get(path.suffix, _lines)
    try:
        yield from read(path)
    except OSError as error:
        raise PrepareError(f"{path} cannot be read: {error}") from error


def _lines(path: Path) -> Iterator[Item]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                where = f"{path.name} line {number}"
                try:
                    item = Item(where, json.loads(line.decode("utf-8-sig")))
                except (ValueError, RecursionError) as error:  # JSON and UTF-8 errors are ValueErrors
                    item = Item(where, None, f"not JSON ({error}): {line[:60]!r}")
                yield item


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


def _table(path: Path) -> Iterator[Item]:
    with path.open(encoding="utf-8-sig", newline="") as file:
        rows = csv.DictReader(file, delimiter="\t" if path.suffix == ".tsv" else ",")
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
            rows = (raw for batch in file.iter_batches(batch_size=1000) for raw in batch.to_pylist())
            for number, raw in enumerate(rows):
                yield Item(f"{path.name} record {number}", raw)
    except pyarrow.ArrowException as error:
        raise PrepareError(f"{path} is not a parquet file: {error}") from error


def open_source(
    source: str, data_set: DataSet, subset: str | None = None, revision: str | None = None
) -> Source:
    """The source of records. Raises PrepareError when ``source`` is no file, folder or hub name, or has no records."""
    path = Path(source).expanduser()
    if not path.exists():
        if path.suffix in SUFFIXES or not _HUB_NAME.fullmatch(source):
            what = "no such file or folder, and not a data set on the hub (owner/name)"
            raise PrepareError(f"--source={source}: {what}")
        return _of_hub(source, data_set, subset, revision)
    if given := [f"--{key}={value}" for key, value in (("subset", subset), ("revision", revision)) if value]:
        raise PrepareError(f"{' '.join(given)} works only for the hub; --source={source} is a local path")
    if path.is_file() and path.suffix not in SUFFIXES:
        raise PrepareError(f"--source={path}: expected a file {', '.join(SUFFIXES)}")
    files = [path] if path.is_file() else _data_files(path, "*") or _data_files(path, "*/*")
    if not files:
        raise PrepareError(f"--source={path} holds no file {', '.join(SUFFIXES)}")
    # If some names in a folder contain a split, only those files are read.
    named = [file for file in files if split_of(file.stem)] or files
    found = Source({"kind": "files", "source": str(path)}, {})
    found.about["not_read"] = [str(file) for file in files if file not in named]
    hashes = found.about["files"] = {}

    def items(file: Path) -> Iterator[Item]:
        hashes[str(file)] = sha256_of(file)
        yield from items_of(file)

    for file in named:
        found.add(split_of(file.stem) or data_set.split, partial(items, file))
    return found


def split_of(name: str) -> str | None:
    """train, val or test from a file's or split's name ("hotpot_dev_distractor_v1": val), or None."""
    words = re.split(r"[^a-z0-9]+", name.lower())
    return next((SPLIT_WORDS[word] for word in words if word in SPLIT_WORDS), None)


@dataclass
class Source:
    """Where records come from. ``about`` is for the manifest, complete once the records are read."""

    about: dict
    parts: dict[str, list[Callable[[], Iterator[Item]]]]

    def add(self, split: str, part: Callable[[], Iterator[Item]]) -> None:
        self.parts.setdefault(split, []).append(part)

    def splits(self) -> list[str]:
        return [split for split in SPLITS if split in self.parts]

    def items(self, split: str) -> Iterator[Item]:
        for part in self.parts[split]:
            yield from part()


def _data_files(folder: Path, pattern: str) -> list[Path]:
    return sorted(file for file in folder.glob(pattern) if file.suffix in SUFFIXES and file.is_file())


def _of_hub(name: str, data_set: DataSet, subset: str | None, revision: str | None) -> Source:
    """A data set on the hub, through ``datasets.load_dataset``."""
    try:
        import datasets

        subset = _choose_subset(
            datasets.get_dataset_config_names(name, revision=revision), subset, data_set, name
        )
        loaded = datasets.load_dataset(name, subset, revision=revision)
    except PrepareError:
        raise
    except Exception as error:  # several libraries raise here: import, network, hub, formats, scripts
        reason = " ".join(str(error).split())[:300]
        why = f"cannot be loaded from the hub: {type(error).__name__}: {reason}"
        raise PrepareError(f"--source={name} {why}") from error
    found = Source({"kind": "hub", "source": name, "subset": subset, "revision": revision}, {})
    read = found.about["splits"] = {}

    def items(split: str) -> Iterator[Item]:
        digest, number = hashlib.sha256(), 0
        try:
            for number, raw in enumerate(loaded[split], start=1):
                digest.update(json.dumps(raw, sort_keys=True, default=str).encode() + b"\n")
                yield Item(f"{name} {split} record {number - 1}", raw)
        finally:  # --limit may close it early
            read[split] = {"records_read": number, "sha256_of_records": digest.hexdigest()}

    for split in loaded:
        found.add(split_of(split) or data_set.split, partial(items, split))
    return found


def _choose_subset(there: list[str], wanted: str | None, data_set: DataSet, name: str) -> str:
    if wanted is not None:
        if wanted not in there:
            raise PrepareError(f"--subset={wanted}: {name} has {', '.join(there)}")
        return wanted
    known = [subset for subset in (*data_set.subsets, *data_set.names) if subset in there]
    if known or len(there) == 1:
        return (known or there)[0]
    raise PrepareError(f"{name} has several parts; choose one with --subset: {', '.join(there)}")
