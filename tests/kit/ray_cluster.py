"""A Ray cluster of several raylets on this machine, which believe to be machines and can be killed one by one."""

import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

# Ray asks everyone who joins or uses a cluster for its token.
TOKEN = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
ON_LOOPBACK = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"  # with it nobody may join


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class RayCluster:
    """`nodes` processes of `ray start`, each with `options`; a context manager that kills them."""

    def __init__(self, log: Path, options: Sequence[str], nodes: int = 2):
        self._log, self._folder = log, tempfile.mkdtemp(prefix="ray")  # a short path: sockets lie in it
        self._start = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", *options]
        self._start += ["--object-store-memory=150000000", "--disable-usage-stats"]
        self._count, self._joined, self.nodes = nodes, 0, []
        port = free_port()
        self.address = f"127.0.0.1:{port}"

    def __enter__(self) -> "RayCluster":
        port = self.address.split(":")[1]
        try:
            self._run("--head", f"--port={port}", "--include-dashboard=false", f"--temp-dir={self._folder}")
            for _ in range(1, self._count):
                self.add()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_) -> None:
        for node in reversed(self.nodes):
            _kill(node)  # asked to end, a node waits half a minute for its workers
        for node in self.nodes:
            node.wait(timeout=60)
        shutil.rmtree(self._folder, ignore_errors=True)

    def add(self) -> None:
        """One more node."""
        self._run(f"--address={self.address}")

    def kill_last(self) -> None:
        """The last node and all its processes end at once, as if their machine had."""
        node = self.nodes.pop()
        _kill(node)
        node.wait(timeout=60)

    def _run(self, *options: str) -> None:
        """One node more; returns when it has joined."""
        self._joined += 1
        environment = {**os.environ, **TOKEN, "RAY_worker_niceness": "0"}
        environment.pop(ON_LOOPBACK, None)
        with open(self._log, "a") as log:
            self.nodes.append(
                subprocess.Popen(
                    [*self._start, *options], stdout=log, stderr=log, env=environment, start_new_session=True
                )
            )
        _wait_for(self._joined, self._log, self.nodes[-1])


def _kill(node: subprocess.Popen) -> None:
    with suppress(ProcessLookupError):
        os.killpg(node.pid, signal.SIGKILL)


def _wait_for(joined: int, log: Path, node: subprocess.Popen) -> None:
    for _ in range(600):
        if log.read_text().count("Ray runtime started") >= joined:
            return
        with suppress(subprocess.TimeoutExpired):
            node.wait(timeout=0.1)
            raise RuntimeError(f"Ray ended with code {node.returncode}")
    raise TimeoutError(f"no Ray after a minute; see {log}")
