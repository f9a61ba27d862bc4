"""The files of a lab, and its manifest: the settings, a hash of every file, and whether a folder still matches."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from verl_credit.lab.config import GENERATOR_VERSION

_PARTS = [
    "manifest.json",
    "corpus.jsonl",
    "train.parquet",
    "dev.parquet",
    "test.parquet",
    "policy",
    "encoder",
    "index",
]


class LabPaths:
    """The files in the folder ``root`` of a lab."""

    def __init__(self, root: Path):
        self.root = root
        self.manifest, self.corpus = root / "manifest.json", root / "corpus.jsonl"
        self.train, self.dev, self.test = (self.questions(split) for split in ("train", "dev", "test"))
        self.policy, self.encoder, self.index = root / "policy", root / "encoder", root / "index"

    def questions(self, split: str) -> Path:
        """The parquet file of ``train``, ``dev`` or ``test``."""
        return self.root / f"{split}.parquet"


def lab_directory(cache: Path, world_seed: int = 0, size: str = "full") -> Path:
    """The folder of one lab in a cache of labs, which is keyed by generator version, size and seed."""
    return Path(cache) / f"lab-v{GENERATOR_VERSION}-{size}-seed{world_seed}"


def write_manifest(root: Path, *, world_seed: int, size: str, recipe: dict, measured: dict) -> None:
    """Write the manifest, after all other files: a folder without it is incomplete."""
    manifest = {
        "generator_version": GENERATOR_VERSION,
        "world_seed": world_seed,
        "size": size,
        "recipe": recipe,
        "measured": measured,
        "files": _hashes(root),
    }
    LabPaths(root).manifest.write_text(json.dumps(manifest, indent=2) + "\n")


def read_manifest(directory: Path) -> dict:
    """The manifest of a lab. Raises ValueError, naming the file, when it is missing or not JSON."""
    path = LabPaths(Path(directory)).manifest
    try:
        manifest = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read ({error}): the lab is incomplete or corrupt") from error
    if not isinstance(manifest, dict) or not isinstance(manifest.get("files"), dict):
        raise ValueError(f"{path} lists no files: the lab is corrupt")
    return manifest


def why_invalid(directory: Path, *, world_seed: int, size: str) -> str | None:
    """Why the folder is not the complete, unchanged lab of these settings; None when it is."""
    directory = Path(directory)
    try:
        manifest = read_manifest(directory)
    except ValueError as error:
        return str(error)
    wanted = {"generator_version": GENERATOR_VERSION, "world_seed": world_seed, "size": size}
    for key, value in wanted.items():
        if manifest.get(key) != value:
            return f"{key} is {manifest.get(key)!r}, wanted {value!r}"
    found = _hashes(directory)
    for name in sorted(manifest["files"].keys() | found.keys()):
        if name not in found:
            return f"{name} is missing"
        if name not in manifest["files"]:
            return f"{name} does not belong there"
        if found[name] != manifest["files"][name]:
            return f"{name} has changed since it was built"
    return None


def is_valid(directory: Path, *, world_seed: int, size: str = "full") -> bool:
    """Whether the folder is the complete, unchanged lab of this seed, size and generator version."""
    return why_invalid(directory, world_seed=world_seed, size=size) is None


def refuse_foreign(directory: Path) -> None:
    """Raise FileExistsError when the folder contains anything else than a lab, which a build would delete."""
    if directory.is_dir():
        foreign = sorted(p.name for p in directory.iterdir() if p.name not in _PARTS)
        if foreign:
            raise FileExistsError(
                f"{directory} holds {foreign[0]!r}, which is not part of a lab: choose an empty or new folder"
            )
    elif directory.exists():
        raise FileExistsError(f"{directory} is a file: choose an empty or new folder")


def _hashes(root: Path) -> dict[str, str]:
    files = sorted(p for p in root.rglob("*") if p.is_file() and p != root / "manifest.json")
    return {p.relative_to(root).as_posix(): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}
