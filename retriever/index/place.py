"""The place of an index: one build of it at a time, and one moment at which it appears."""

import logging
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from verl_credit_retriever.index.manifest import previous_of
from verl_credit_retriever.index.shards import BuildRefused

log = logging.getLogger("verl_credit_retriever")


def check_out(out: Path, overwrite: bool) -> None:
    """Errors: FileExistsError when `out` exists, unless it is an index and `overwrite` is set."""
    if out.exists() and not (overwrite and (out / "manifest.json").is_file()):
        hint = "pass overwrite to replace it" if (out / "manifest.json").is_file() else "it is not an index"
        raise FileExistsError(f"out={str(out)!r} exists: {hint}")


@contextmanager
def lock(out: Path) -> Iterator[None]:
    """One build of `out` at a time. The lock ends with the process, whatever ends it."""
    path = out.with_name(f".{out.name}.lock")
    # Not 0 seconds: the file may be one that its last owner is just removing, and is then tried again.
    held = FileLock(path, timeout=0.1, fallback_to_soft=False)
    try:
        held.acquire()
    except Timeout:
        owner = (path.read_text() if path.exists() else "") or "unknown"
        raise BuildRefused(f"out={str(out)!r}: process {owner} is building it; wait for its end") from None
    try:
        path.write_text(str(os.getpid()))
        yield
    finally:
        path.unlink(missing_ok=True)
        held.release()


def restore(out: Path) -> None:
    """Put back the index that `move_into_place` had moved aside when its process was killed."""
    old = previous_of(out)
    if not out.exists() and (old / "manifest.json").is_file():
        os.rename(old, out)
        log.warning("%s: an interrupted --overwrite had moved it to %s; it is back", out, old)


def move_into_place(stage: Path, out: Path, files: tuple[str, ...]) -> None:
    """Make the complete folder `stage` the index `out`, in place of the one that may be there."""
    # Without this a power cut after the rename could leave a complete-looking folder of empty files.
    for path in [*(stage / name for name in (*files, "manifest.json")), stage]:
        _flush(path)
    old = previous_of(out)
    if out.exists():
        shutil.rmtree(old, ignore_errors=True)
        os.rename(out, old)
    try:
        os.rename(stage, out)
    except BaseException:
        restore(out)
        raise
    _flush(out.parent)
    shutil.rmtree(old, ignore_errors=True)


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
