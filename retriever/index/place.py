"""The folder of an index: one build at a time may write it, and it appears in one rename."""

import logging
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from verl_credit_retriever.index.manifest import IndexMismatch, backup_of
from verl_credit_retriever.index.shards import BuildRefused

log = logging.getLogger("verl_credit_retriever")


def check_out(out: Path, overwrite: bool) -> None:
    """Errors: FileExistsError when `out` exists, unless it is an index and `overwrite` is set."""
    if out.exists() and not (overwrite and (out / "manifest.json").is_file()):
        hint = "pass overwrite to replace it" if (out / "manifest.json").is_file() else "it is not an index"
        raise FileExistsError(f"out={str(out)!r} exists: {hint}")


def import_stage(out: Path) -> Path:
    """`import_index` puts the index together here."""
    return out.with_name(f".{out.name}.importing")


@contextmanager
def lock(out: Path) -> Iterator[None]:
    """Allows one build of `out` at a time. The lock ends with the process in any case."""
    path = out.with_name(f".{out.name}.lock")
    # The timeout is not 0: the last owner may just be removing the file, which is then tried again.
    held = FileLock(path, timeout=0.1, fallback_to_soft=False)
    try:
        held.acquire()
    except Timeout:
        owner = (path.read_text() if path.exists() else "") or "unknown"
        raise BuildRefused(f"out={str(out)!r}: process {owner} is building it; wait for its end") from None
    try:
        path.write_text(str(os.getpid()))
        # No import runs now: a killed one left this, perhaps with a copy of 65 GB.
        shutil.rmtree(import_stage(out), ignore_errors=True)
        yield
    finally:
        path.unlink(missing_ok=True)
        held.release()


def restore(out: Path) -> None:
    """Put back the index that `move_into_place` had moved aside when its process was killed."""
    old = backup_of(out)
    if not out.exists() and (old / "manifest.json").is_file():
        os.rename(old, out)
        log.warning("%s: an interrupted --overwrite had moved it to %s; it is back", out, old)


def move_into_place(stage: Path, out: Path, files: tuple[str, ...]) -> None:
    """Make the complete folder `stage` the index `out`, in place of the one that may be there."""
    # Without this a power cut after the rename could leave a complete-looking folder of empty files.
    for path in [*(stage / name for name in (*files, "manifest.json")), stage]:
        _flush(path)
    old = backup_of(out)
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


@contextmanager
def refuse_replacement(folder: Path) -> Iterator[None]:
    """Refuse an index folder that `index --overwrite` replaced while the block read it.

    Files of two indexes would answer with the wrong documents. Errors: IndexMismatch at the end of the block, also
    in place of an error that the mixture caused.
    """
    before = _identity(folder)
    try:
        yield
    finally:
        if _identity(folder) != before:
            raise IndexMismatch(
                f"{folder}: replaced while loading: its files are of two indexes; load it again"
            )


def _identity(folder: Path) -> tuple:
    """The folder's device and inode, which a rename keeps, and its manifest; () where there is no index."""
    try:
        status = folder.stat()
        return status.st_dev, status.st_ino, (folder / "manifest.json").read_bytes()
    except OSError:
        return ()


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
