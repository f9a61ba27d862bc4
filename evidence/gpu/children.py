"""Starts commands, and ends each with everything it started, whatever session that moved to."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

GRACE_S = 60  # for a run to stop Ray and its servers
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
POLL_S, LAST_LINES = 0.2, 5
_PRCTL = ctypes.CDLL(None).prctl


@dataclass(frozen=True)
class Ended:
    """How a command ended: ``code`` is None where it was cut, ``lines`` are its last, ``why`` is "" if it went well."""

    code: int | None
    lines: list[str]
    seconds: float
    why: str


def adopt_orphans() -> None:
    """Make this process the parent of every process below it that loses its own, so that `below` finds all."""
    _PRCTL(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def start(command: Sequence[str], **options) -> subprocess.Popen:
    """The command in a session of its own; it gets SIGTERM when this process dies, however it dies."""
    return subprocess.Popen(
        command, start_new_session=True, preexec_fn=lambda: _PRCTL(PR_SET_PDEATHSIG, signal.SIGTERM), **options
    )  # fmt: skip


def below(root: int, leave: Collection[int] = ()) -> list[int]:
    """Live processes that descend from ``root``, without those of ``leave`` and what they started."""
    parents = {pid: parent for pid, (parent, _) in _processes().items()}
    return [pid for pid in parents if pid not in leave and _descends(pid, root, parents, leave)]


def _descends(pid: int, root: int, parents: dict[int, int], leave: Collection[int]) -> bool:
    while (pid := parents.get(pid, 0)) not in (0, root):
        if pid in leave:
            return False
    return pid == root


def _processes() -> dict[int, tuple[int, int]]:
    """Process -> (parent, session); a zombie holds nothing and is left out."""
    found = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            state, parent, _, session = stat.read_text().rpartition(")")[2].split()[:4]
            if state != "Z":
                found[int(stat.parent.name)] = int(parent), int(session)
    return found


def left(process: subprocess.Popen, leave: Collection[int]) -> list[int]:
    """What the command started and still runs: its session, and what descends from this process but not from ``leave``."""
    process.poll()
    session = [pid for pid, (_, of) in _processes().items() if of == process.pid]
    return sorted({*session, *below(os.getpid(), leave)})


def end(process: subprocess.Popen, leave: Collection[int], grace_s: float = GRACE_S) -> list[int]:
    """SIGTERM to the session, time to clean up, then SIGKILL to what is left; returns what even that did not end.

    What it started in other sessions ends by itself when it is gone, or is ended after a sixth of the time.
    """
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    with suppress(subprocess.TimeoutExpired):
        process.wait(grace_s)
    if _wait(process, leave, grace_s / 6):
        for pid in left(process, leave):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    return _wait(process, leave, grace_s)


def _wait(process: subprocess.Popen, leave: Collection[int], seconds: float) -> list[int]:
    over = time.monotonic() + seconds
    while (found := left(process, leave)) and time.monotonic() < over:
        time.sleep(0.1)
    return found


def run(
    command: Sequence[str],
    output: Path,
    environment: Mapping[str, str],
    late: Callable[[float], str],
    tick: Callable[[], None],
    grace_s: float = GRACE_S,
) -> Ended:
    """The command to its end, or until ``late`` (of the seconds so far) says why it is cut. Nothing of it is left then.

    What it prints goes to ``output``. ``tick`` is called while it runs.
    """
    output.parent.mkdir(parents=True, exist_ok=True)
    leave, begun, cut = below(os.getpid()), time.monotonic(), ""
    with output.open("w") as file:
        process = start(
            list(command),
            stdout=file,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env=dict(environment),
        )
    try:
        while process.poll() is None and not (cut := late(time.monotonic() - begun)):
            tick()
            time.sleep(POLL_S)
    finally:
        survivors = end(process, leave, grace_s)
    lines = [line for line in output.read_text(errors="replace").splitlines() if line.strip()][-LAST_LINES:]
    code = None if cut else process.returncode
    why = "" if code == 0 else f"{cut or f'exit code {code}'}: {' | '.join(lines)[-300:]}"
    why += f"; processes {survivors} could not be ended" if survivors else ""
    return Ended(code, lines, round(time.monotonic() - begun, 1), why)
