"""Imports what every worker of a run imports, once, and makes each worker by fork:

    python -m verl_credit.host.process.fork_server NAME RUN_DIR EARLY LATE    (EARLY, LATE: modules with commas)

A run on the CPU starts eight Python processes, and each spends seconds of CPU on the same imports. Ray starts a worker with
``runtime_env.py_executable``; that is `fork_client`, which asks here. The forked process takes over the client's files,
folder, environment and limits, and runs the same script (Ray's default_worker.py), so that it registers under its own id.

A worker is forked only if we know of nothing in which it would differ from a fresh process (`fork_imports`). Else the client
starts Python itself, and the run's events give the reason. The server ends when its standard input does, thus with `train`;
its workers get SIGKILL when it ends, and a worker when its client ends.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import runpy
import select
import selectors
import signal
import socket
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from verl_credit.host.process.fork_client import PATIENCE_S, is_ours
from verl_credit.host.process.fork_imports import Imports
from verl_credit.records.run import events

KIND = "fork_workers"
IMPORTED = "the fork server has imported what the workers need"
REQUEST_S = 10.0
PR_SET_PDEATHSIG = 1


class Request(NamedTuple):
    """The message that `fork_client` sends."""

    words: list[str]
    environment: dict[str, str]
    folder: str
    umask: int
    niceness: int
    oom_score: str
    blocked: list[int]
    limits: list[list[int]]


def receive(connection: socket.socket, files: list[int]) -> Request:
    """Adds the client's standard files to ``files``, also where its request cannot be read."""
    if not is_ours(connection):
        raise ValueError("another user asks for a worker")
    connection.settimeout(REQUEST_S)
    files += socket.recv_fds(connection, 1, 3)[1]
    with connection.makefile("rb") as lines:
        request = Request(**json.loads(lines.readline()))
    if len(files) < 3:
        raise ValueError("its standard files did not arrive")
    return request


def has_ended(connection: socket.socket) -> bool:
    """Whether a client has closed its end: it says nothing after its request."""
    return bool(select.select([connection], [], [], 0)[0])


def answer(connection: socket.socket, **fields) -> None:
    with suppress(OSError):  # when a client has ended, its worker is killed
        connection.sendall(json.dumps(fields).encode() + b"\n")


class Server:
    def __init__(self, listener: socket.socket, imports: Imports, run_dir: Path) -> None:
        self.imports, self.run_dir, self._listener = imports, run_dir, listener
        self._pid = os.getpid()
        self._waiting = selectors.DefaultSelector()
        self._waiting.register(listener, selectors.EVENT_READ)
        self._waiting.register(0, selectors.EVENT_READ)
        self._workers: dict[int, socket.socket] = {}
        """The client of each worker, by the worker's id."""
        self._ends = socket.socketpair()
        """The signal that a worker has ended writes into the second; many Pythons have no `os.pidfd_open`."""
        self._ends[1].setblocking(False)
        signal.set_wakeup_fd(self._ends[1].fileno(), warn_on_full_buffer=False)
        self._before = signal.signal(signal.SIGCHLD, lambda *_: None)
        self._waiting.register(self._ends[0], selectors.EVENT_READ)

    def serve(self) -> Request | None:
        """Returns the request in the worker's process, and None in the server when its standard input ends."""
        while True:
            # One at a time, because the end of a worker frees the file numbers of the others.
            [(key, _), *_] = self._waiting.select()
            if key.fd == 0:
                return None
            if key.fileobj is self._listener:
                if (request := self._asked()) is not None:
                    return request
            elif key.fileobj is self._ends[0]:
                self._ends[0].recv(4096)
                self._reap()
            else:  # a client says nothing: this is its end
                os.kill(key.data, signal.SIGKILL)
                self._waiting.unregister(key.fileobj)

    def _record(self, kind: str, text: str, **more) -> None:
        with suppress(OSError):  # a full disk does not end the workers
            events.record(self.run_dir, kind, text, **more)

    def _refuse(self, connection: socket.socket, why: str) -> None:
        self._record(KIND, f"a worker makes its own imports: {why}")
        answer(connection, starts=False)
        connection.close()

    def _asked(self) -> Request | None:
        try:
            connection, _ = self._listener.accept()
        except OSError as error:  # too many open files, for instance; the workers go on
            self._waiting.unregister(self._listener)
            self._listener.close()
            self._record(KIND, f"every further worker makes its own imports: {error}")
            return None
        files: list[int] = []
        try:
            request = receive(connection, files)
            began, late = time.monotonic(), self.imports.late
            why = self.imports.why_not(request.environment)
            if late and not why:
                self._record(events.STAGE, IMPORTED, seconds=time.monotonic() - began)
            if not why and has_ended(connection):
                why = f"its client has ended, or has waited for {PATIENCE_S:.0f} seconds"
            worker = None if why else os.fork()
        except Exception as error:
            worker, why = None, f"its request failed: {error!r}"
        if worker == 0:
            self._become(request, connection, files)
            return request
        for file in files:
            os.close(file)
        if worker is None:
            self._refuse(connection, why)
        else:
            self._workers[worker] = connection
            self._waiting.register(connection, selectors.EVENT_READ, worker)
        return None

    def _become(self, request: Request, connection: socket.socket, files: list[int]) -> None:
        """Makes this fork the client's worker, and answers; the client starts Python where that fails."""
        try:
            self._let_go(files)
            self.imports.move_to(request.environment)
            take_over(request)
        except Exception as error:
            self._refuse(connection, f"the fork failed: {error!r}")
            os._exit(1)
        answer(connection, starts=True)
        connection.close()

    def _let_go(self, files: list[int]) -> None:
        """Takes the client's standard files, and closes those of the server."""
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != self._pid:
            os._exit(1)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, self._before)
        for to, file in enumerate(files):
            os.dup2(file, to)
            os.close(file)
        self._waiting.close()
        for one in (*self._ends, *self._workers.values()):
            one.close()

    def _reap(self) -> None:
        for worker, connection in list(self._workers.items()):
            ended, status = os.waitpid(worker, os.WNOHANG)
            if ended:
                del self._workers[worker]
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
    if (oom_score := Path("/proc/self/oom_score_adj")).read_text() != request.oom_score:
        oom_score.write_text(request.oom_score)
    sys.argv[:] = request.words
    if not sys.flags.safe_path:
        sys.path.insert(0, os.path.dirname(request.words[0]))
    signal.pthread_sigmask(signal.SIG_SETMASK, request.blocked)


def main(name: str, run_dir: Path, early: list[str], late: list[str]) -> None:
    if not sys.flags.safe_path:
        sys.path.pop(0)  # the folder of `train`, in which a worker's Python does not look
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"\0{name}")
        listener.listen(64)
        imports = Imports(early, late)
        request = Server(listener, imports, run_dir).serve()
    if request is not None:
        runpy.run_path(request.words[0], run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), *(words.split(",") for words in sys.argv[3:]))
