"""Files of an index: errors name the one that was written, and hashes are computed once as long as nothing was written."""

import errno
import hashlib
import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

NO_ROOM = (errno.ENOSPC, errno.EFBIG, errno.EDQUOT)


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """The block writes `path`. Errors: an OSError that says only that there is no room names `path` as well."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno in NO_ROOM:
            raise OSError(error.errno, error.strerror, str(path)) from None
        raise


def sha256(path: Path) -> str:
    """Hex digest of a file."""
    with open(path, "rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def known_sha256(path: Path) -> str:
    """Hex digest of a file: the one of last time, where device, inode, size, mtime and ctime are still the same.

    With it a start need not read 65 GB. The kernel sets ctime at every write and at every change of times, and no program
    can set it back. Kept in the user's cache folder, which others cannot write. What this does not see: a disk that gives
    other bytes than were written, and writes through a memory map that was open when the file was hashed.
    """
    store = _cache_folder() / "hashes.json"
    known, key = _read_hashes(store), _key(path)
    if key in known:
        return known[key]
    found = sha256(path)
    if _key(path) == key:  # it did not change meanwhile
        _write_hashes(store, {name: value for name, value in known.items() if _is_there(name)} | {key: found})
    return found


def _cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "verl_credit_retriever"


def _key(path: Path) -> str:
    status = path.stat()
    numbers = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
    return f"{path.resolve()}|{'|'.join(map(str, numbers))}"


def _is_there(key: str) -> bool:
    path = Path(key.rsplit("|", 5)[0])
    try:
        return _key(path) == key
    except OSError:
        return False


def _read_hashes(store: Path) -> dict[str, str]:
    """Empty for a file that is not there, not this user's, open to others' writing, or damaged."""
    try:
        status = store.stat()
        if status.st_uid != os.getuid() or status.st_mode & 0o022:
            return {}
        found = json.loads(store.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    good = isinstance(found, dict) and all(isinstance(value, str) for value in found.values())
    return found if good else {}


def _write_hashes(store: Path, known: dict[str, str]) -> None:
    """In one rename; without a place for it the next start computes again."""
    try:
        store.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(dir=store.parent)
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                json.dump(known, file)
            os.replace(name, store)
        except OSError:
            os.unlink(name)
            raise
    except OSError:
        return
