"""The sources of records: files, a folder of files, or the Hugging Face hub."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from verl_credit.built_folder import sha256_of
from verl_credit.worlds.data.catalogue import DataSet
from verl_credit.worlds.data.files import SUFFIXES, Item, items_of
from verl_credit.worlds.data.readers import as_list
from verl_credit.worlds.data.records import PrepareError

SPLITS = ("train", "val", "test")
SPLIT_WORDS = {
    "train": "train",
    "dev": "val",
    "val": "val",
    "valid": "val",
    "validation": "val",
    "test": "test",
}
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


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
    """A file, or the files of a folder; each file's name contains its split. ``described`` is for the manifest."""

    def __init__(self, path: Path, data_set: DataSet):
        self.path = path
        folder = path if path.is_dir() else path.parent
        files, self.not_read = _data_files(path, data_set) if path.is_dir() else ([path], [])
        if path.is_file() and path.suffix not in SUFFIXES:
            raise PrepareError(f"--source={path}: expected a file {', '.join(SUFFIXES)}")
        if not files:
            raise PrepareError(f"--source={path} holds no file {', '.join(SUFFIXES)}")
        self._files: dict[str, list[Path]] = {}
        for file in files:
            self._files.setdefault(split_of(file.stem) or data_set.split, []).append(file)
        self.alias_path = folder / data_set.alias_file if data_set.alias_file else None
        self.aliases = _read_aliases(self.alias_path)
        self._read: list[Path] = [self.alias_path] if self.aliases else []

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
    """(files to read, files not to read) of the folder or, if it has none, of its subfolders.

    If some names contain a split, only those files are read.
    """

    def matching(pattern: str) -> list[Path]:
        files = (f for f in folder.glob(pattern) if f.suffix in SUFFIXES and f.name != data_set.alias_file)
        return sorted(f for f in files if f.is_file())

    files = matching("*") or matching("*/*")
    named = [file for file in files if split_of(file.stem)]
    return (named, [file for file in files if file not in named]) if named else (files, [])


def _read_aliases(path: Path | None) -> dict[str, list[str]]:
    """2WikiMultihopQA's other names of entities: lines of ``{"Q_id", "aliases", "demonyms"}``."""
    if path is None or not path.exists():
        return {}
    aliases = {}
    for item in items_of(path):
        row = item.raw
        if not isinstance(row, Mapping) or not isinstance(row.get("Q_id"), str):
            raise PrepareError(f"{item.where}: expected {{Q_id, aliases, demonyms}}, found {row!r:.80}")
        aliases[row["Q_id"]] = [*as_list(row.get("aliases")), *as_list(row.get("demonyms"))]
    return aliases


@dataclass
class _Read:
    records: int = 0
    digest: object = None


class HubSource:
    """A data set on the hub, through ``datasets.load_dataset``."""

    def __init__(self, name: str, data_set: DataSet, subset: str | None, revision: str | None):
        self.name, self.revision, self.aliases = name, revision, {}
        try:
            import datasets
        except ImportError as error:
            raise PrepareError(
                f"--source={name}: loading from the hub needs `pip install datasets` ({error})"
            ) from error
        try:
            subsets = datasets.get_dataset_config_names(name, revision=revision)
            self.subset = _choose_subset(subsets, subset, data_set, name)
            self._loaded = datasets.load_dataset(name, self.subset, revision=revision)
        except PrepareError:
            raise
        except Exception as error:  # several libraries raise here: network, hub, formats, scripts
            reason = " ".join(str(error).split())[:300]
            raise PrepareError(
                f"--source={name} cannot be loaded from the hub: {type(error).__name__}: {reason}"
            ) from error
        self._names: dict[str, list[str]] = {}
        for split in self._loaded:
            self._names.setdefault(split_of(split) or data_set.split, []).append(split)
        self._read: dict[str, _Read] = {}

    def splits(self) -> list[str]:
        return [split for split in SPLITS if split in self._names]

    def items(self, split: str) -> Iterator[Item]:
        for name in self._names[split]:
            read = self._read[name] = _Read(digest=hashlib.sha256())
            for number, raw in enumerate(self._loaded[name]):
                read.records += 1
                line = json.dumps(raw, sort_keys=True, default=str)
                read.digest.update(line.encode() + b"\n")
                yield Item(f"{self.name} {name} record {number}", raw)

    def described(self) -> dict:
        read = self._read
        # The address of a download contains the commit.
        downloads = {url for name in read for url in (self._loaded[name].info.download_checksums or {})}
        return {
            "kind": "hub",
            "source": self.name,
            "subset": self.subset,
            "revision": self.revision,
            "downloads": sorted(map(str, downloads)),
            "splits": {
                name: {"records_read": r.records, "sha256_of_records": r.digest.hexdigest()}
                for name, r in read.items()
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
