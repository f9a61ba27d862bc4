"""The sources of records: files (JSON, JSON lines, tables with a header, parquet), a folder of files, or the Hugging Face
hub."""

from __future__ import annotations

import csv
import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from verl_credit.built_folder import sha256_of
from verl_credit.worlds.data.catalogue import DataSet, as_list
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
) -> FileSource | HubSource:
    """The source of records. Raises PrepareError when ``source`` is no file, folder or hub name, or has no records."""
    path = Path(source).expanduser()
    if path.exists():
        given = [f"--{key}={value}" for key, value in (("subset", subset), ("revision", revision)) if value]
        if given:
            raise PrepareError(f"{' '.join(given)} works only for the hub; --source={source} is a local path")
        return FileSource(path, data_set)
    if path.suffix in SUFFIXES or not _HUB_NAME.fullmatch(source):
        raise PrepareError(
            f"--source={source}: no such file or folder, and not a data set on the hub (owner/name)"
        )
    return HubSource(source, data_set, subset, revision)


def split_of(name: str) -> str | None:
    """train, val or test from a file's or split's name ("hotpot_dev_distractor_v1": val), or None."""
    words = re.split(r"[^a-z0-9]+", name.lower())
    return next((SPLIT_WORDS[word] for word in words if word in SPLIT_WORDS), None)


class FileSource:
    """A file, or the files of a folder; each file's name contains its split."""

    def __init__(self, path: Path, data_set: DataSet):
        self.path = path
        files, self.not_read = _data_files(path, data_set) if path.is_dir() else ([path], [])
        if path.is_file() and path.suffix not in SUFFIXES:
            raise PrepareError(f"--source={path}: expected a file {', '.join(SUFFIXES)}")
        if not files:
            raise PrepareError(f"--source={path} holds no file {', '.join(SUFFIXES)}")
        self._files: dict[str, list[Path]] = {}
        for file in files:
            self._files.setdefault(split_of(file.stem) or data_set.split, []).append(file)
        alias_path = (path if path.is_dir() else path.parent) / data_set.alias_file
        self.aliases = _read_aliases(alias_path) if data_set.alias_file and alias_path.exists() else {}
        self._read: list[Path] = [alias_path] if self.aliases else []

    def splits(self) -> list[str]:
        return [split for split in SPLITS if split in self._files]

    def items(self, split: str) -> Iterator[Item]:
        for file in self._files[split]:
            self._read.append(file)
            yield from items_of(file)

    def described(self) -> dict:
        return {
            "kind": "files",
            "source": str(self.path),
            "files": {str(file): sha256_of(file) for file in self._read},
            "not_read": [str(file) for file in self.not_read],
        }


def _data_files(folder: Path, data_set: DataSet) -> tuple[list[Path], list[Path]]:
    """(files to read, files not to read) of the folder or, if it has none, of its subfolders. If some names contain a split,
    only those files are read."""

    def matching(pattern: str) -> list[Path]:
        files = (f for f in folder.glob(pattern) if f.suffix in SUFFIXES and f.name != data_set.alias_file)
        return sorted(f for f in files if f.is_file())

    files = matching("*") or matching("*/*")
    named = [file for file in files if split_of(file.stem)]
    return (named, [file for file in files if file not in named]) if named else (files, [])


def _read_aliases(path: Path) -> dict[str, list[str]]:
    """2WikiMultihopQA's other names of entities: lines of ``{"Q_id", "aliases", "demonyms"}``."""
    aliases = {}
    for item in items_of(path):
        row = item.raw
        if not isinstance(row, Mapping) or not isinstance(row.get("Q_id"), str):
            raise PrepareError(f"{item.where}: expected {{Q_id, aliases, demonyms}}, found {row!r:.80}")
        aliases[row["Q_id"]] = [*as_list(row.get("aliases")), *as_list(row.get("demonyms"))]
    return aliases


class HubSource:
    """A data set on the hub, through ``datasets.load_dataset``."""

    def __init__(self, name: str, data_set: DataSet, subset: str | None, revision: str | None):
        self.name, self.revision, self.aliases = name, revision, {}
        try:
            import datasets

            subsets = datasets.get_dataset_config_names(name, revision=revision)
            self.subset = _choose_subset(subsets, subset, data_set, name)
            self._loaded = datasets.load_dataset(name, self.subset, revision=revision)
        except PrepareError:
            raise
        except Exception as error:  # several libraries raise here: import, network, hub, formats, scripts
            reason = " ".join(str(error).split())[:300]
            raise PrepareError(
                f"--source={name} cannot be loaded from the hub: {type(error).__name__}: {reason}"
            ) from error
        self._names: dict[str, list[str]] = {}
        for split in self._loaded:
            self._names.setdefault(split_of(split) or data_set.split, []).append(split)
        self._digests: dict[str, object] = {}
        self._counts: Counter = Counter()

    def splits(self) -> list[str]:
        return [split for split in SPLITS if split in self._names]

    def items(self, split: str) -> Iterator[Item]:
        for name in self._names[split]:
            digest = self._digests[name] = hashlib.sha256()
            for number, raw in enumerate(self._loaded[name]):
                self._counts[name] = number + 1
                digest.update(json.dumps(raw, sort_keys=True, default=str).encode() + b"\n")
                yield Item(f"{self.name} {name} record {number}", raw)

    def described(self) -> dict:
        # The address of a download contains the commit.
        infos = [self._loaded[name].info for name in self._digests]
        downloads = {url for info in infos for url in info.download_checksums or {}}
        return {
            "kind": "hub",
            "source": self.name,
            "subset": self.subset,
            "revision": self.revision,
            "downloads": sorted(map(str, downloads)),
            "splits": {
                name: {"records_read": self._counts[name], "sha256_of_records": digest.hexdigest()}
                for name, digest in self._digests.items()
            },
        }


def _choose_subset(there: list[str], wanted: str | None, data_set: DataSet, name: str) -> str:
    if wanted is not None:
        if wanted not in there:
            raise PrepareError(f"--subset={wanted}: {name} has {', '.join(there)}")
        return wanted
    known = [subset for subset in (*data_set.subsets, *data_set.names) if subset in there]
    if known or len(there) == 1:
        return (known or there)[0]
    raise PrepareError(f"{name} has several parts; choose one with --subset: {', '.join(there)}")
