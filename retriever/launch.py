"""Start and stop a retriever on this machine. Standard library only: it imports neither torch nor FAISS."""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Self


class ServerHandle:
    """A running server: `url`, `pid`, `stop()`; also a context manager that stops it."""

    def __init__(self, process: subprocess.Popen, url: str, log_path: Path):
        self._process, self.url, self.pid, self.log_path = process, url, process.pid, log_path

    def alive(self) -> bool:
        """Returns whether the process still runs."""
        return self._process.poll() is None

    def stop(self, timeout: float = 35.0) -> int:
        """End the server, by force after `timeout` seconds; returns its exit code. May be called twice.

        It drains before it ends, for up to 30 seconds.
        """
        return _stop(self._process, timeout)

    def __enter__(self) -> Self:
        return self

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
    if threads < 1:
        raise ValueError(f"threads={threads}; at least 1")
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
        try:
            address = _wait_for(port_file, process, log_path, ready_timeout)
        except BaseException:
            _stop(process, timeout=5)
            raise
    return ServerHandle(process, f"http://{address['host']}:{address['port']}", log_path)


def _wait_for(port_file: Path, process: subprocess.Popen, log_path: Path, timeout: float) -> dict:
    deadline = time.monotonic() + timeout
    while not port_file.exists():
        code = process.poll()
        if code is not None:
            raise RuntimeError(f"the retriever ended with code {code} before it was ready\n{_tail(log_path)}")
        if time.monotonic() > deadline:
            raise TimeoutError(f"the retriever was not ready after {timeout:g} s\n{_tail(log_path)}")
        time.sleep(0.02)
    return json.loads(port_file.read_text())


def _tail(log_path: Path, lines: int = 15) -> str:
    text = log_path.read_text(errors="replace").splitlines()[-lines:]
    return "\n".join([f"last lines of {log_path}:", *text])


def _stop(process: subprocess.Popen, timeout: float) -> int:
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    return process.returncode
