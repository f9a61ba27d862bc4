"""Was an index folder replaced by another one while it was read?"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from verl_credit_retriever.index.manifest import IndexMismatch


@contextmanager
def unreplaced(folder: Path) -> Iterator[None]:
    """Everything opened in the block is of one index: files of two would answer with the wrong documents.

    `index --overwrite` replaces the folder by a rename, so that what a path names changes from one moment to the
    next. Errors: IndexMismatch at the end of the block, also in place of an error that came of the mixture.
    """
    before = _identity(folder)
    try:
        yield
    except Exception as error:
        _compare(folder, before, error)
        raise
    _compare(folder, before, None)


def _compare(folder: Path, before: tuple, cause: Exception | None) -> None:
    if _identity(folder) != before:
        raise IndexMismatch(
            f"{folder}: replaced while loading: its files are of two indexes; load it again"
        ) from cause


def _identity(folder: Path) -> tuple:
    """The folder's own number, which a rename brings along, and the manifest; () where there is none."""
    try:
        status = folder.stat()
        return status.st_dev, status.st_ino, (folder / "manifest.json").read_bytes()
    except OSError:
        return ()
