"""A table and its companion under one lock: whole lines are added to both, or to neither."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path


class LineageError(OSError):
    """A file of a store cannot be read or written; the message names it."""


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold ``flock`` on ``path``, as other writers of the format do; a missing file and folder are created."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise cannot("written", path, error) from error
    try:
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError as error:
            raise cannot("locked", path, error) from error
        yield
    finally:
        os.close(file)


def read(path: Path, shared: bool = False) -> bytes:
    """The whole file; empty when it is missing. ``shared``: wait until no process writes."""
    try:
        with path.open("rb") as file:
            if shared:
                fcntl.flock(file, fcntl.LOCK_SH)
            return file.read()
    except FileNotFoundError:
        return b""
    except OSError as error:
        raise cannot("read", path, error) from error


def new_line(path: Path) -> bytes:
    """Returns the line end that an appended line needs first when a kill has cut the last line; else nothing."""
    try:
        with path.open("rb") as file:
            end = file.seek(0, os.SEEK_END)
            file.seek(max(end - 1, 0))
            return b"" if file.read() in (b"", b"\n") else b"\n"
    except FileNotFoundError:
        return b""
    except OSError as error:
        raise cannot("read", path, error) from error


def add(lines: Mapping[Path, bytes]) -> None:
    """Appends to every file; the lines are on the disk when this returns. If one file fails, no file keeps its lines."""
    before: dict[Path, int] = {}
    for path, content in lines.items():
        try:
            _add(path, content, before)
        except OSError as error:
            for other, size in before.items():
                with suppress(OSError):  # a cut line may remain, which readers report
                    os.truncate(other, size)
            raise cannot("written", path, error) from error


def _add(path: Path, content: bytes, before: dict[Path, int]) -> None:
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
    try:
        before[path] = os.fstat(file).st_size
        while content:
            content = content[os.write(file, content) :]
        os.fsync(file)
    finally:
        os.close(file)


def cannot(what: str, path: Path, error: OSError) -> LineageError:
    return LineageError(f"{path} cannot be {what}: {error.strerror}")
