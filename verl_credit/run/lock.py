"""One run per folder, and per folder of checkpoints: a lock that the kernel frees however the process ends."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from verl_credit.errors import PreflightError

LOCK = "run.lock"
# A file system without locks: said, and the run goes on.
UNSUPPORTED = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


@contextmanager
def run_lock(run_dir: Path, say: Callable[[str], None] = print, key: str = "run_dir") -> Iterator[None]:
    """Hold ``run_dir``, the value of ``key``, for this process; the folder is made when it is not there.

    The file stays when the run ends: it is the lock on it that counts, so a killed run blocks nobody.
    Errors: PreflightError when another process holds it (with its pid), or when the folder cannot be written.
    """
    run_dir = Path(run_dir)
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        file = (run_dir / LOCK).open("a+")
    except OSError as error:
        raise PreflightError(
            f"{key}={run_dir}: {error.strerror or error}; expected a folder that can be written"
        ) from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise PreflightError(_held(run_dir, key)) from None
        except OSError as error:
            if error.errno not in UNSUPPORTED:
                raise
            say(f"{run_dir}: this file system has no locks; a second run in the folder would not be noticed")
        file.seek(0)
        file.truncate()
        json.dump({"pid": os.getpid(), "host": socket.gethostname()}, file)
        file.flush()
        yield


def _held(run_dir: Path, key: str) -> str:
    try:
        holder = json.loads((run_dir / LOCK).read_text())
        who = f"process {holder['pid']} on {holder['host']}"
    except (OSError, ValueError, KeyError, TypeError):
        who = "another process"
    return f"{key}={run_dir}: {who} is running there; wait for it, or give this run another {key}"
