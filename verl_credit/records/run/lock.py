"""A lock that lets one run at a time use a run folder or a checkpoint folder. The kernel frees it when the process ends."""

import errno
import json
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from verl_credit.errors import PreflightError

LOCK = "run.lock"
# Errors of a file system without locks: the run continues with a warning.
UNSUPPORTED = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


@contextmanager
def run_lock(run_dir: Path, say: Callable[[str], None] = print, key: str = "run_dir") -> Iterator[None]:
    """Hold ``run_dir``, the value of ``key``, for this process. The file stays when the run ends: only the lock on it
    matters. Raises PreflightError when another process holds it (with its pid), or when the folder cannot be written."""
    path = Path(run_dir) / LOCK
    lock = FileLock(path, blocking=False, fallback_to_soft=False)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except Timeout:
        raise PreflightError(_held(path, key)) from None
    except OSError as error:
        if error.errno not in UNSUPPORTED:
            why = f"{error.strerror or error}; expected a folder that can be written"
            raise PreflightError(f"{key}={run_dir}: {why}") from error
        say(f"{run_dir}: this file system has no locks; a second run in the folder would not be noticed")
    try:
        path.write_text(json.dumps({"pid": os.getpid(), "host": socket.gethostname()}))
        yield
    finally:
        lock.release()


def holder_is_gone(run_dir: Path) -> bool:
    """The process that last held the folder ran on this machine, and no process has its number any more."""
    try:
        holder = json.loads((Path(run_dir) / LOCK).read_text())
        if holder["host"] != socket.gethostname():
            return False
        os.kill(int(holder["pid"]), 0)
    except ProcessLookupError:
        return True
    except (OSError, ValueError, KeyError, TypeError, OverflowError):
        return False
    return False


def _held(path: Path, key: str) -> str:
    try:
        holder = json.loads(path.read_text())
        who = f"process {holder['pid']} on {holder['host']}"
    except (OSError, ValueError, KeyError, TypeError):
        who = "another process"
    return f"{key}={path.parent}: {who} is running there; wait for it, or give this run another {key}"
