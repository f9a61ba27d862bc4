"""A folder that is built once and then reused. Its manifest holds the settings of the build and a hash of every file."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

from filelock import FileLock, Timeout

MANIFEST = "manifest.json"
Progress = Callable[[float, str], None]  # share done in [0, 1], description of the current work


def reuse_or_build(
    folder: Path,
    settings: Mapping[str, object],
    fill: Callable[[Path], Mapping[str, object]],
    *,
    parts: Collection[str],
    name: str,
    progress: Progress = lambda share, text: None,
) -> None:
    """Build ``folder`` with ``fill`` and these settings, unless a build with the same settings is there, unchanged.

    ``fill`` writes into a folder beside it, renamed when it is complete, and returns further entries of the manifest.
    ``parts``: the names that a build may replace; FileExistsError is raised when ``folder`` holds another one. A second
    process that wants the same folder waits for the first, and then reuses it.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder.with_name(f".{folder.name}.lock"))
    try:
        held = lock.acquire(timeout=0)
    except Timeout:
        progress(0.0, f"another process builds {name} in {folder}: waiting for it")
        held = lock.acquire()
    with held:
        refuse_foreign(folder, parts, name)
        reason = why_invalid(folder, settings, name)
        if reason is None:
            progress(1.0, f"using {name} in {folder}")
            return
        if folder.exists() and any(folder.iterdir()):
            progress(0.0, f"rebuilding {name} in {folder}: {reason}")
        work = folder.with_name(f".{folder.name}.building")
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir(parents=True)
        try:
            write_manifest(work, settings, fill(work))
            shutil.rmtree(folder, ignore_errors=True)
            work.rename(folder)
        finally:
            shutil.rmtree(work, ignore_errors=True)
        progress(1.0, f"{name} is in {folder}")


def write_manifest(folder: Path, settings: Mapping[str, object], more: Mapping[str, object]) -> None:
    """Called after all other files are written: a folder without a manifest is incomplete."""
    manifest = {**settings, **more, "files": hashes(folder)}
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")


def read_manifest(folder: Path, name: str) -> dict:
    """Raises ValueError, naming the file, when it is missing or has another form."""
    path = folder / MANIFEST
    try:
        manifest = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read ({error}): {name} is incomplete or corrupt") from error
    if not isinstance(manifest, dict) or not isinstance(manifest.get("files"), dict):
        raise ValueError(f"{path} lists no files: {name} is corrupt")
    return manifest


def why_invalid(folder: Path, settings: Mapping[str, object], name: str) -> str | None:
    """Why the folder is not complete, unchanged and built with these settings; None when it is."""
    try:
        manifest = read_manifest(folder, name)
    except ValueError as error:
        return str(error)
    for key, value in settings.items():
        if manifest.get(key) != value:
            return f"{key} is {manifest.get(key)!r}, wanted {value!r}"
    digests = hashes(folder)
    known = manifest["files"]
    for file in sorted(known.keys() | digests.keys()):
        if file not in digests:
            return f"{file} is missing"
        if known.get(file) != digests[file]:
            return (
                f"{file} has changed since it was built" if file in known else f"{file} does not belong there"
            )
    return None


def refuse_foreign(folder: Path, parts: Collection[str], name: str) -> None:
    """Raise FileExistsError when the folder contains anything else than ``parts``, which a build would delete."""
    if folder.exists() and not folder.is_dir():
        raise FileExistsError(f"{folder} is a file: choose an empty or new folder")
    names = (path.name for path in folder.iterdir()) if folder.exists() else ()
    if foreign := min(set(names) - {MANIFEST, *parts}, default=None):
        other = f"{foreign!r}, which is not part of {name}"
        raise FileExistsError(f"{folder} holds {other}: choose an empty or new folder")


def hashes(folder: Path) -> dict[str, str]:
    """SHA-256 of every file but the manifest, by its path in the folder."""
    files = sorted(p for p in folder.rglob("*") if p.is_file() and p != folder / MANIFEST)
    return {p.relative_to(folder).as_posix(): sha256_of(p) for p in files}


def sha256_of(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
