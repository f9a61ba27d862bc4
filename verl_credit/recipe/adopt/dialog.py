"""Starts bash on a script, confined, and lets a `Follower` answer what it asks, until the script ends or a deadline does."""

from __future__ import annotations

import fcntl
import os
import re
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

from verl_credit.recipe.adopt import confine
from verl_credit.recipe.adopt.confine import WRITES
from verl_credit.recipe.adopt.follow import Follower
from verl_credit.recipe.adopt.opened import OWN

HERE = Path(__file__).parent
QUESTIONS, ANSWERS, TAKE, GIVE = 201, 202, 203, 204
PATIENCE = 0.5
_RECEIVE, _GO_ON, _ADD = 0xC0502100, 0xC0182101, 0x40182103
_STREAMS = ("/dev/std", "/dev/fd/", "/proc/self/fd/")


class Unconfined(Exception):
    """bash is missing, or this kernel cannot confine it."""


class _Late(Exception):
    pass


def follow(script: Sequence[str], environment: Mapping[str, str], seconds: float) -> tuple[Follower, bool]:
    """(what the script would have started, did it end before the deadline?) Raises Unconfined."""
    bash = shutil.which("bash")
    if bash is None:
        raise Unconfined("bash is not on PATH")
    ours, theirs = socket.socketpair()
    (asked, asks), (hears, answers), (take, give) = os.pipe(), os.pipe(), os.pipe()
    os.write(give, b"x")
    places = {asks: QUESTIONS, hears: ANSWERS, take: TAKE, give: GIVE}
    kept = {name: value for name, value in environment.items() if not name.startswith(("BASH_", "__"))}
    command = [sys.executable, "-I", "-S", confine.__file__, str(theirs.fileno())]
    command += [",".join(f"{old}:{new}" for old, new in places.items()), bash, *script]
    process = subprocess.Popen(
        command, env={**kept, "BASH_ENV": str(HERE / "shell.bash")}, pass_fds=(theirs.fileno(), *places),
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip
    theirs.close()
    for place in places:
        os.close(place)
    assert process.stderr is not None
    try:
        opened = _listener(ours, process)
        dialog = _Dialog(asked, answers, process, time.monotonic() + seconds)
        threading.Thread(target=_serve_opens, args=(opened, dialog.follower), daemon=True).start()
        complaints = threading.Thread(target=_hear, args=(process.stderr, dialog.follower.notes), daemon=True)
        complaints.start()
        ended = dialog.serve()
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        os.close(asked)
        os.close(answers)
        ours.close()
    complaints.join(1.0)
    return dialog.follower, ended


def _listener(ours: socket.socket, process: subprocess.Popen) -> int:
    message, descriptors, *_ = socket.recv_fds(ours, 1, 1)
    if not message:
        raise Unconfined(process.communicate()[1].decode(errors="replace").strip())
    return descriptors[0]


def _hear(stderr: IO[bytes], notes: list[str]) -> None:
    """Notes where bash cannot read the script; it ends there. What else it prints is of no interest."""
    for line in stderr:
        if re.search(rb": (syntax error|unexpected EOF|cannot execute binary)", line):
            notes.append(f"bash says: {line.decode(errors='replace').strip()}")


def _serve_opens(opened: int, follower: Follower) -> None:
    """Every file that the group opens for writing is /dev/null, until the group has ended.

    A process that has ended needs no answer, and one that a signal interrupts asks again.
    """
    null, questions = os.open(os.devnull, os.O_RDWR), select.poll()
    questions.register(opened, select.POLLIN)
    while questions.poll()[0][1] & select.POLLIN:
        asked = bytearray(80)
        try:
            fcntl.ioctl(opened, _RECEIVE, asked)
        except OSError:
            continue
        number, pid, _, call, _, _, *arguments = struct.unpack("QIIiIQ6Q", asked)
        at = int(call != 2)  # x86-64's open has no folder
        writes = bool(arguments[at + 1] & WRITES)
        with suppress(OSError):
            path = _text_at(pid, arguments[at])
            if not OWN.match(path):
                follower.files.opens(pid, path, writes)
            if not writes or path.startswith(_STREAMS):  # Landlock decides
                fcntl.ioctl(opened, _GO_ON, struct.pack("QqiI", number, 0, 0, 1))
            else:
                fcntl.ioctl(opened, _ADD, struct.pack("QIIII", number, 2, null, 0, 0))
    os.close(null)
    os.close(opened)


def _text_at(pid: int, address: int) -> str:
    with open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
        memory.seek(address)
        return os.fsdecode(memory.read(4096).split(b"\0", 1)[0])


class _Dialog:
    def __init__(self, asked: int, answers: int, process: subprocess.Popen, end: float) -> None:
        self.follower = Follower(self._ask)
        self._asked, self._answers, self._process, self._end = asked, answers, process, end
        self._fields = self._read()

    def serve(self) -> bool:
        """Answers until every process of the group has ended (True) or the deadline comes."""
        try:
            for count in self._fields:
                self._say(self._answer(*(next(self._fields) for _ in range(int(count)))))
        except (StopIteration, RuntimeError, BrokenPipeError):
            return True
        except _Late:
            return False
        return True

    def _answer(self, kind: str, *fields: str) -> str:
        return getattr(self.follower, kind)(*fields)

    def _ask(self, code: str, count: int) -> list[str]:
        self._say(f'{code}; __hear; builtin eval "$__answer"')
        if count >= 0:
            return [next(self._fields) for _ in range(count)]
        return [*iter(lambda: next(self._fields), "\x04")]

    def _say(self, code: str) -> None:
        text = os.fsencode(code) + b"\0"
        while text:
            text = text[os.write(self._answers, text) :]

    def _read(self) -> Iterator[str]:
        rest = b""
        quiet = 0
        while True:
            left = self._end - time.monotonic()
            if left <= 0:
                raise _Late
            if not select.select([self._asked], [], [], min(left, PATIENCE))[0]:
                quiet += self._process.poll() is not None
                if quiet > 1:  # what the script left in the background asks nothing any more
                    return
                continue
            part = os.read(self._asked, 1 << 16)
            if not part:
                return
            *whole, rest = (rest + part).split(b"\0")
            yield from map(os.fsdecode, whole)
