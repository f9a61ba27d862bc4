"""The files that a script reads. What is in one is not known where it is not here, or where the script itself writes it."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path

from verl_credit.recipe.adopt.marks import mark_in
from verl_credit.recipe.adopt.unknown import GLOB, Event, Unknown
from verl_credit.recipe.adopt.words import NAME, READS, Word, has_command

_TESTS = re.compile(r"-[a-hkprstuwxGLNOS]|-nt|-ot|-ef")
OWN = re.compile(
    r"/usr/|/lib|/etc/ld\.so|/dev/(null|zero|full|tty|std|fd)|/proc/(self|thread-self|filesystems|sys/kernel/ng)|/sys/fs/"
)
"""Files of the machine that programs open without a word of the script, and the streams."""
_MACHINE = re.compile("/(dev|proc|sys)/|/etc/host")
_INPUT = re.compile(r"<|^(source|\.) ")


class Files:
    def __init__(self, unknown: Unknown) -> None:
        self.unknown = unknown
        self._written: set[str] = set()
        self._read: list[tuple[Event, str, bool, bool]] = []

    def writes(self, event: Event, path: str) -> None:
        self._written.add(_absolute(event, path))

    def mark_of(self, event: Event, path: str, *, here: bool = False) -> str:
        """A mark where the file may be another one in the launch, or where it has to be ``here`` and is not."""
        if not path.startswith("/") and (mark := mark_in(event.folder)):
            return mark
        file = _absolute(event, path)
        if any(f"{file}/".startswith(f"{one}/") or one.startswith(f"{file}/") for one in [*self._written]):
            return self.unknown.mark(f"the script itself makes or changes {file}")
        if _MACHINE.match(f"{file}/") and not OWN.match(file):
            return self.unknown.mark(f"{file} is another one on the machine where the launch runs")
        missing = here and not os.path.lexists(file)
        return self.unknown.mark(f"{file}, which line {event.line} reads, is not here") if missing else ""

    def made(self, event: Event, raw: Iterable[Word]) -> str:
        """A mark where the script itself makes a file that is one of the words."""
        plain = [one.text for one in raw if not (has_command(one.text) or re.search("[|&;()]", one.text))]
        paths = self.unknown.expanded(plain) if self._written else []
        return next(filter(None, (self.mark_of(event, path) for path in paths)), "")

    def opens(self, pid: int, path: str, writes: bool) -> None:
        """A process of the group opens a file."""
        shell = str(pid)
        while shell not in self.unknown.last:
            if not (shell := parent(shell)):
                return
        event = self.unknown.last[shell]
        if writes:
            self.writes(event, path)
        elif mark := self.mark_of(event, path, here=True):
            by_bash = os.path.basename(os.readlink(f"/proc/{pid}/exe")) == "bash"
            self._read.append((event, mark, by_bash, os.path.isdir(_absolute(event, path))))
            self.unknown.flag("", mark, lossy=True)

    def settle(self, event: Event) -> None:
        """What was read before this command by the last one, or by a compound command that has this one in it."""
        while self._read:
            last, mark, by_bash, folder = self._read.pop()
            if by_bash and folder and not GLOB.search(last.text + event.text):
                continue
            if by_bash and not (GLOB if folder else _INPUT).search(last.text):
                event.read = mark
                self.unknown.lose(self.unknown.mark.why(mark))
                continue
            if by_bash:
                last.mark, last.lossy = mark, True
            self.unknown.decide(last, mark, test=last.is_condition)
            self.unknown.pin(read_names(last), mark)

    def tested(self, event: Event) -> str:
        """A mark where a test of a file may come out otherwise in the launch."""
        given = [word.text for word in event.words]
        raw = [given[n + 1] for n, word in enumerate(given[:-1]) if _TESTS.fullmatch(word)]
        if not re.match(r"\[|test", event.text):
            return ""
        if "-t" in given:
            return self.unknown.mark(f"line {event.line} asks for a terminal")
        paths = self.unknown.expanded(one for one in raw if not has_command(one))
        return next(filter(None, (self.mark_of(event, path) for path in paths)), "")


def read_names(event: Event) -> list[str]:
    """The variables that `read` or `mapfile` sets."""
    given = [one.text for one in event.words]
    if not given or given[0] not in READS:
        return []
    default = "REPLY" if given[0] == "read" else "MAPFILE"
    return [one for one in given[1:] if re.fullmatch(NAME, one)] or [default]


def parent(pid: str) -> str:
    """The number of the process that started this one; "" where it has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]
    except OSError:
        return ""


def _absolute(event: Event, path: str) -> str:
    return os.path.normpath(os.path.join(event.folder, path))
