"""Start and stop a retriever on this machine. Standard library only: it imports neither torch nor FAISS."""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path


class ServerHandle(AbstractContextManager):
    """A running server: `url`, `pid`, `stop()`; also a context manager that stops it."""

    url = ""

    def __init__(self, process: subprocess.Popen, log_path: Path):
        self._process, self.pid, self.log_path = process, process.pid, log_path

    def alive(self) -> bool:
        """Returns whether the process still runs."""
        return self._process.poll() is None

    def stop(self, timeout: float = 35.0) -> int:
        """End the server, by force after `timeout` seconds; returns its exit code. May be called twice.

        It drains before it ends, for up to 30 seconds.
        """
        if self.alive():
            self._process.terminate()
            try:
                self._process.wait(timeout)
            except subprocess.TimeoutExpired:
                self._process.kill()
        return self._process.wait()

    def __exit__(self, *_) -> None:
        self.stop()


def start_server(
    index: str | Path,
    encoder: str | Path,
    *,
    threads: int = 1,
    log_path: str | Path,
    ready_timeout: float = 120.0,
    port: int = 0,
    topk: int = 3,
    device: str = "cpu",
    options: Sequence[str] = (),
) -> ServerHandle:
    """Serve `index` on a loopback port (0: a free one) in its own process; returns when it is ready.

    Its output is appended to `log_path`. It ends when this process ends, even by a kill; Ctrl-C in the terminal
    reaches only this process. `options` are further arguments of `serve`. Errors: RuntimeError with the last log
    lines when the server ends before it is ready, TimeoutError when it is not ready after `ready_timeout` seconds.
    """
    log_path = Path(log_path)
    log_path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="retriever-") as scratch, open(log_path, "ab") as log:
        port_file = Path(scratch) / "port.json"
        settings = {"index": index, "encoder": encoder, "port": port, "topk": topk, "threads": threads}
        settings |= {"device": device, "port-file": port_file, "parent-pid": os.getpid()}
        arguments = [f"--{name}={value}" for name, value in settings.items()]
        process = subprocess.Popen(
            [sys.executable, "-m", "verl_credit_retriever.cli", "serve", *arguments, *options],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, "OMP_NUM_THREADS": str(threads)},
            start_new_session=True,
        )
        server, deadline = ServerHandle(process, log_path), time.monotonic() + ready_timeout
        try:
            while not port_file.exists():
                if not server.alive():
                    problem = f"the retriever ended with code {process.returncode} before it was ready"
                    raise RuntimeError(f"{problem}\n{_tail(log_path)}")
                if time.monotonic() > deadline:
                    problem = f"the retriever was not ready after {ready_timeout:g} s"
                    raise TimeoutError(f"{problem}\n{_tail(log_path)}")
                time.sleep(0.02)
        except BaseException:
            server.stop(timeout=5)
            raise
        server.url = "http://{host}:{port}".format(**json.loads(port_file.read_text()))
    return server


def _tail(log_path: Path) -> str:
    lines = log_path.read_text(errors="replace").splitlines()[-15:]
    return "\n".join([f"last lines of {log_path}:", *lines])
