"""Imports what every worker of a run imports, once, and makes each worker by fork:

    python -m verl_credit.host.process.fork_server SOCKET RUN_DIR EARLY LATE    (EARLY, LATE: modules with commas)

A run on the CPU starts eight Python processes, and each spends seconds of CPU on the same imports. Ray starts a worker with
``runtime_env.py_executable``; that is `fork_client`, which asks here. The forked process takes over the client's files,
folder, environment and limits, and runs the same script (Ray's default_worker.py), so that it registers under its own id.

A worker is forked only if it cannot differ from a fresh process (`fork_imports`). Else the client starts Python itself, and
the run's events give the reason. The server ends when its standard input does, thus with `train`; its workers get SIGKILL
when it ends, and a worker when its client ends.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import runpy
import selectors
import signal
import socket
import struct
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from verl_credit.host.process.fork_imports import Imports
from verl_credit.records.run import events

KIND = "fork_workers"
IMPORTED = "the fork server has imported what the workers need"
REQUEST_S = 10.0
PR_SET_PDEATHSIG = 1


class Request(NamedTuple):
    """What `fork_client` sends."""

    words: list[str]
    environment: dict[str, str]
    folder: str
    umask: int
    niceness: int
    oom_score: str
    blocked: list[int]
    limits: list[list[int]]


def is_ours(connection: socket.socket) -> bool:
    _, user, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return user == os.getuid()


def receive(connection: socket.socket) -> tuple[Request, list[int]]:
    connection.settimeout(REQUEST_S)
    _, files, _, _ = socket.recv_fds(connection, 1, 3)
    with connection.makefile("rb") as lines:
        return Request(**json.loads(lines.readline())), files


def answer(connection: socket.socket, **fields) -> None:
    with suppress(OSError):  # the end of a client has its worker ended
        connection.sendall(json.dumps(fields).encode() + b"\n")


class Server:
    def __init__(self, listener: socket.socket, imports: Imports, run_dir: Path) -> None:
        self.imports, self.run_dir, self._listener = imports, run_dir, listener
        self._pid = os.getpid()
        self._waiting = selectors.DefaultSelector()
        self._waiting.register(listener, selectors.EVENT_READ)
        self._waiting.register(0, selectors.EVENT_READ)
        self._workers: dict[int, tuple[int, socket.socket]] = {}
        """The id and the client of each worker, by its pidfd."""

    def serve(self) -> Request | None:
        """Returns the request in the worker's process, and None in the server when its standard input ends."""
        while True:
            # One at a time, because the end of a worker frees the file numbers of the others.
            [(key, _), *_] = self._waiting.select()
            if key.fd == 0:
                return None
            if key.fileobj is self._listener:
                connection, _ = self._listener.accept()
                if (request := self._asked(connection)) is not None:
                    return request
            elif key.fd in self._workers:
                self._ended(key.fd)
            else:  # a client says nothing: this is its end
                os.kill(self._workers[key.data][0], signal.SIGKILL)
                self._waiting.unregister(key.fileobj)

    def _asked(self, connection: socket.socket) -> Request | None:
        files: list[int] = []
        try:
            if not is_ours(connection):
                raise ValueError("another user asks for a worker")
            request, files = receive(connection)
            began, late = time.monotonic(), bool(self.imports.late)
            why = self.imports.why_not(request.environment)
            if late and not self.imports.late:
                events.record(self.run_dir, events.STAGE, IMPORTED, seconds=time.monotonic() - began)
            worker = None if why else os.fork()
        except (OSError, ValueError, TypeError) as error:
            worker, why = None, f"its request failed: {error}"
        if worker == 0:
            self._let_go(connection, files)
            return request
        answer(connection, starts=worker is not None)
        for file in files:
            os.close(file)
        if worker is None:
            events.record(self.run_dir, KIND, f"a worker imports verl itself: {why}")
            connection.close()
        else:
            pidfd = os.pidfd_open(worker)
            self._workers[pidfd] = worker, connection
            self._waiting.register(pidfd, selectors.EVENT_READ)
            self._waiting.register(connection, selectors.EVENT_READ, pidfd)
        return None

    def _let_go(self, connection: socket.socket, files: list[int]) -> None:
        """In a worker: takes the client's standard files, and closes those of the server."""
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != self._pid:
            os._exit(1)
        for to, file in enumerate(files):
            os.dup2(file, to)
            os.close(file)
        self._waiting.close()
        connection.close()
        for pidfd, (_, other) in self._workers.items():
            os.close(pidfd)
            other.close()

    def _ended(self, pidfd: int) -> None:
        worker, connection = self._workers.pop(pidfd)
        _, status = os.waitpid(worker, 0)
        self._waiting.unregister(pidfd)
        os.close(pidfd)
        if connection in self._waiting.get_map():
            self._waiting.unregister(connection)
        answer(connection, status=status)
        connection.close()


def take_over(request: Request) -> None:
    """Makes this process what Python would be if the client had started it."""
    os.setpgid(0, 0)
    os.chdir(request.folder)
    os.umask(request.umask)
    for name, soft, hard in request.limits:
        resource.setrlimit(name, (soft, hard))
    os.setpriority(os.PRIO_PROCESS, 0, request.niceness)
    Path("/proc/self/oom_score_adj").write_text(request.oom_score)
    sys.argv[:] = request.words
    sys.path.insert(0, os.path.dirname(request.words[0]))
    signal.pthread_sigmask(signal.SIG_SETMASK, request.blocked)


def main(address: str, run_dir: Path, early: list[str], late: list[str]) -> None:
    if not sys.flags.safe_path:
        sys.path.pop(0)  # the folder of `train`, in which a worker's Python does not look
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen(64)
        imports = Imports(early, late)
        request = Server(listener, imports, run_dir).serve()
    if request is not None:
        imports.move_to(request.environment)
        take_over(request)
        runpy.run_path(request.words[0], run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), *(words.split(",") for words in sys.argv[3:]))
