"""`verl-credit train` in a process of its own, as a user starts it; what it prints goes to a file."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil


class TrainRun:
    """``seconds``: what any wait for it may take; then every process of it is ended."""

    def __init__(
        self, log: Path, *arguments: str, environment: dict[str, str] | None = None, seconds: float = 900
    ):
        self.log, self.seconds = log, seconds
        with log.open("w") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-W", "ignore", "-m", "verl_credit.cli", "train", *arguments],
                cwd=log.parent,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={**os.environ, **(environment or {})},
                # A suite that runs in the background may ignore Ctrl-C; what it starts must not.
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
            )

    @property
    def output(self) -> str:
        return self.log.read_text()

    def wait_for(self, words: str) -> None:
        """Until these words are printed."""
        deadline = time.monotonic() + self.seconds
        while words not in self.output:
            if self.process.poll() is not None or time.monotonic() > deadline:
                self.kill()
                raise AssertionError(f"{words!r} was not printed:\n{self.output}")
            time.sleep(0.05)

    def interrupt(self) -> None:
        """Ctrl-C, which reaches the whole group."""
        os.killpg(self.process.pid, signal.SIGINT)

    def wait(self) -> int:
        """The exit code."""
        try:
            return self.process.wait(self.seconds)
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(f"the run did not end:\n{self.output}") from None

    def kill(self) -> None:
        if self.process.poll() is None:
            run = psutil.Process(self.process.pid)
            for process in (*run.children(recursive=True), run):
                process.kill()


def train(log: Path, *arguments: str, **options) -> tuple[int, str]:
    """(exit code, everything printed)."""
    run = TrainRun(log, *arguments, **options)
    return run.wait(), run.output
