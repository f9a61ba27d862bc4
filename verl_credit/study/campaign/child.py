"""Runs as child processes: `verl-credit train` or `twin` is started, waited for and stopped."""

from __future__ import annotations

import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path

from verl_credit.errors import ExitCode
from verl_credit.recipe.compose import quoted


def run_command(
    engine: str, recipe: str, overrides: Sequence[str], config_dir: str | None = None
) -> list[str]:
    """``engine``: the command of verl-credit that makes the run, train or twin."""
    command = [sys.executable, "-m", "verl_credit.cli", engine, "--config-name", recipe]
    return [*command, *(["--config-dir", config_dir] if config_dir else []), *overrides]


def in_folder(overrides: Iterable[str], run_dir: Path) -> list[str]:
    others = [text for text in overrides if not text.startswith("run_dir=")]
    return [*others, f"run_dir={quoted(str(run_dir))}"]


class Children:
    """Processes side by side. Ctrl-C reaches them by itself, SIGTERM is handed on; then ``stopped`` is true. They are waited
    for in both cases: a run has Ray and the retriever to stop and its report to write."""

    def __init__(self) -> None:
        self.stopped = False
        self._running: dict[str, subprocess.Popen] = {}
        self._ended: queue.SimpleQueue[tuple[str, int]] = queue.SimpleQueue()

    def __enter__(self) -> Children:
        self._before = {n: signal.signal(n, self._stop) for n in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *_) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def __len__(self) -> int:
        return len(self._running)

    def start(self, name: str, command: Sequence[str], log: Path | None = None) -> None:
        """``log``: the file of its output; None: our own output."""
        if log is None:
            process = subprocess.Popen(command)
        else:
            log.parent.mkdir(parents=True, exist_ok=True)
            with log.open("ab") as output:
                process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        self._running[name] = process
        threading.Thread(target=lambda: self._ended.put((name, process.wait())), daemon=True).start()
        if self.stopped:  # a signal came while it was being started
            process.terminate()

    def wait(self) -> tuple[str, int]:
        """Name and exit code of the next child that ends."""
        name, code = self._ended.get()
        del self._running[name]
        return name, code

    def _stop(self, number: int, _frame: object) -> None:
        self.stopped = True
        if number == signal.SIGTERM:
            for process in list(self._running.values()):
                process.terminate()


def run_child(command: Sequence[str]) -> int:
    """The exit code of one process; INTERRUPTED if a signal came meanwhile."""
    with Children() as children:
        children.start("", command)
        _, code = children.wait()
    return ExitCode.INTERRUPTED if children.stopped else code
