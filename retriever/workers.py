"""Several worker processes on one port. Each has its socket and its encoder; they share the index's pages.

One worker: `python -m verl_credit_retriever.workers LISTENER_FD READY_FD`, settings on stdin.
"""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

from pydantic import TypeAdapter

from verl_credit_retriever.index.manifest import check_files, fingerprint, read_manifest
from verl_credit_retriever.index.place import refuse_replacement
from verl_credit_retriever.serve import END_SECONDS, announce, bind, end_with, serve_in_this_process
from verl_credit_retriever.settings import ServeSettings

POLL_SECONDS = 0.05
PAUSE_S = 5.0
"""Before the next try where a worker could not start, to spare the cores."""
READY = b"ready"
SETTINGS = TypeAdapter(ServeSettings)
COMMAND = (sys.executable, "-m", f"{__package__}.workers")


class _Worker:
    """A worker process and its replacements."""

    def __init__(self, command: list[str], settings: ServeSettings, listener: socket.socket, metrics: str):
        self._command, self._settings = command, settings
        self._listener, self._metrics_folder = listener, metrics
        self.ready, self._start_at = False, 0.0
        self.start()

    def start(self) -> None:
        # A socket of its own, so that idle connections are spread too. It begins to listen when the worker is ready,
        # and ends with the worker.
        own = bind(*self._listener.getsockname()[:2], shared=True)
        reader, writer = os.pipe()
        descriptors = (own.fileno(), writer)
        environment = {**os.environ, "PROMETHEUS_MULTIPROC_DIR": self._metrics_folder}
        environment["OMP_NUM_THREADS"] = str(self._settings.threads)
        # The settings contain the token, so they go through a pipe, which no process list shows.
        try:
            self.process = subprocess.Popen(
                [*self._command, *map(str, descriptors)],
                stdin=subprocess.PIPE,
                pass_fds=descriptors,
                env=environment,
                process_group=0,  # a terminal's Ctrl-C reaches only the parent, which then ends its workers
            )
        except OSError:
            os.close(reader)
            raise
        finally:
            own.close()
            os.close(writer)
        os.set_blocking(reader, False)
        self._reader, self.ready = reader, False
        with suppress(BrokenPipeError):  # a worker that has ended breaks the pipe; `poll` replaces it
            self.process.stdin.write(SETTINGS.dump_json(self._settings))
            self.process.stdin.close()

    def poll(self) -> None:
        """Notice that the process is ready or has ended, and start another after a pause."""
        if not self.ready and self._reader is not None:
            with suppress(BlockingIOError):
                self.ready = os.read(self._reader, len(READY)) == READY
        if self.process.poll() is None:
            return
        if self._reader is not None:
            from prometheus_client.multiprocess import mark_process_dead

            os.close(self._reader)
            self._reader = None
            mark_process_dead(self.process.pid, self._metrics_folder)
            self._start_later(f"worker {self.process.pid} ended with code {self.process.returncode}")
        elif time.monotonic() >= self._start_at:
            try:
                self.start()
            except OSError as error:  # without memory for a process, for example, the other workers go on
                self._start_later(f"no worker can be started ({error})")

    def _start_later(self, reason: str) -> None:
        pause = 0.0 if self.ready else PAUSE_S
        self._start_at, self.ready = time.monotonic() + pause, False
        print(f"{reason}; the next starts in {pause:g} s", file=sys.stderr, flush=True)


def run_workers(
    settings: ServeSettings,
    listener: socket.socket,
    *,
    command: Sequence[str] = COMMAND,
    end_seconds: float = END_SECONDS,
) -> int:
    """Serve with `settings.workers` processes until SIGTERM, SIGINT or the parent's end; returns the exit code.

    A worker that ends is replaced while the others serve. A worker that ends before all were ready for the first
    time ends the server with its code. At the end all workers drain at the same time. All serve the verified index:
    once its folder is replaced, no new worker starts. Without --threads each worker takes its share of the cores.
    `limits` hold per worker, which has its own cache and queue. `command` gets the descriptors of a socket that does not
    listen yet and of the pipe that reports "ready". `listener` keeps the port.
    """
    stop: list[bool] = []
    verified = False

    def end(*_) -> None:
        if not verified:
            raise SystemExit(0)  # no worker has started, so there is nothing to drain
        stop.append(True)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, end)
    if settings.parent_pid is not None:
        end_with(settings.parent_pid, force_after=end_seconds + 1)
    threads = settings.threads or max(1, (os.cpu_count() or 1) // settings.workers)
    index_pin = None
    if settings.verify != "none":  # once for all workers
        with refuse_replacement(settings.index):
            manifest = read_manifest(settings.index)
            check_files(settings.index, manifest, settings.verify)
        index_pin = fingerprint(manifest)
    verified = True
    each = replace(
        settings,
        workers=1,
        threads=threads,
        port_file=None,
        parent_pid=os.getpid(),
        verify="none",
        index_pin=index_pin,
    )
    workers: list[_Worker] = []
    metrics = tempfile.TemporaryDirectory(prefix="retriever-metrics-", ignore_cleanup_errors=True)
    try:
        for _ in range(settings.workers):
            workers.append(_Worker(list(command), each, listener, metrics.name))
        announced = False
        while not stop:
            for worker in workers:
                worker.poll()
                if not announced and worker.process.poll() is not None:
                    return worker.process.returncode or 1
            if not announced and all(worker.ready for worker in workers):
                announce(listener, settings.host, settings.port_file)
                announced = True
            time.sleep(POLL_SECONDS)
        return _drain(workers, listener, end_seconds)
    finally:
        for worker in workers:
            worker.process.kill()
            worker.process.wait()
        metrics.cleanup()


def _drain(workers: list[_Worker], listener: socket.socket, seconds: float) -> int:
    listener.close()
    ending = [worker for worker in workers if worker.process.poll() is None]
    for worker in ending:
        worker.process.terminate()
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and any(worker.process.poll() is None for worker in ending):
        time.sleep(POLL_SECONDS)
    # A worker that was still starting has nothing to drain and may not handle the signal yet.
    fine = (0, -signal.SIGTERM)
    return 0 if all(worker.process.poll() in fine[: 1 if worker.ready else 2] for worker in ending) else 1


def main() -> int:
    """Serves as one worker on an inherited socket. The exit codes are the server's."""
    listener_fd, ready_fd = map(int, sys.argv[1:])
    settings = SETTINGS.validate_json(sys.stdin.buffer.read())

    def on_ready() -> None:
        os.write(ready_fd, READY)
        os.close(ready_fd)

    try:
        with socket.socket(fileno=listener_fd) as listener:
            return serve_in_this_process(settings, listener, on_ready)
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
