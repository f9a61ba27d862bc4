"""What a builtin command of bash does where a script is only read: its input, its file or its folder may not be here."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from verl_credit.recipe.adopt.marks import mark_in
from verl_credit.recipe.adopt.opened import Files, read_names
from verl_credit.recipe.adopt.unknown import GO, SKIP, Event, Unknown
from verl_credit.recipe.adopt.words import READS, has_command, one_line

_TIME = re.compile(r"%[-\d.]*\(.*?\)T", re.DOTALL)
_EXPECTED = ("errexit", "nounset", "xtrace", "functrace", "noexec")


class Builtins:
    def __init__(self, unknown: Unknown, files: Files, notes: list[str]) -> None:
        self.unknown, self.files, self.notes = unknown, files, notes

    def answer(self, event: Event, name: str, rest: list[str]) -> list[str]:
        """Code that runs the command, or what takes its place."""
        mark = event.unknown
        if one_line(event.text) in self.unknown.unsure:
            if name == "exit":
                self.notes.append(f"line {event.line} may end the script; here it goes on")
            elif name not in ("set", "shift"):
                self.unknown.lose(f"line {event.line} may set it, and does not surely run")
            return [SKIP]
        if name == "trap" and {"DEBUG", "RETURN", "ERR"} & {*rest}:
            names = self.unknown.blocks.sets("; ".join(self.unknown.expanded(rest)))
            self.unknown.pin(names, self.unknown.mark(f"the trap of line {event.line} may set it"))
            return [SKIP]
        if name == "exec":
            replaces = 'exec() { [[ $1 != -a ]] || builtin shift 2; "$@"; builtin exit; }'
            return [replaces if rest else "unset -f exec", GO]
        if name == "set" and rest and rest[0][0] in "-+" and rest[0] != "--":
            return _set(rest)
        if name in ("cd", "pushd", "popd"):
            return self._cd(event, rest)
        if name in ("source", "."):
            return self._source(event, rest[0] if rest else "")
        if name in READS or (name == "printf" and rest[:1] == ["-v"]):
            return self._read(event, rest)
        if name == "unset":
            self.unknown.sets(event, rest)
        if name == "eval" and mark:
            why = self.unknown.mark.why(mark)
            self.unknown.lose(f"line {event.line} evaluates a text that is not known: {why}")
            return [SKIP]
        if name in ("ulimit", "kill") or (name == "wait" and rest):
            ended = self.unknown.mark(f"how {name} ends (line {event.line}) depends on the run")
            self.unknown.decide(event, mark or ended)
        if name in ("enable", "kill", "suspend", "bind"):
            return [SKIP]
        if name in ("pwd", "dirs"):
            mark = mark_in(event.folder)
        elif name in ("type", "hash", "compgen") or (
            name == "command" and rest and re.match("-[vV]", rest[0])
        ):
            mark = mark or self.unknown.mark("whether a program is there depends on the machine")
        elif name in ("jobs", "times", "ulimit") or (name in ("set", "trap") and rest in ([], ["-p"])):
            if name == "ulimit" and re.search(r" (\d|unl)", event.text):
                return [GO]
            mark = mark or self.unknown.mark(f"what {name} prints (line {event.line}) depends on the run")
        elif name == "printf" and _TIME.search(event.text):
            mark = mark or self.unknown.mark(f"printf (line {event.line}) prints a time")
        elif not event.spans:
            mark = ""
        return self.unknown.prints(event, mark) if mark else [GO]

    def _cd(self, event: Event, rest: list[str]) -> list[str]:
        """In a folder that is not here, $PWD is a mark."""
        raw = next((one for one in reversed(rest) if one == "-" or not one.startswith("-")), "")
        if not event.unknown and (not raw or has_command(raw)):
            return [GO]
        folder = self.unknown.value('"$OLDPWD"' if raw == "-" else raw) if raw else ""
        mark = event.unknown or mark_in(folder) or ("" if folder.startswith("/") else mark_in(event.folder))
        if not mark and Path(event.folder, folder).is_dir():
            return [GO]
        mark = mark or self.unknown.mark(f"line {event.line} goes to the folder {folder}, which is not here")
        self.unknown.decide(event, mark, fails=False)
        return [f"OLDPWD=$PWD PWD='{mark}'", SKIP]

    def _source(self, event: Event, raw: str) -> list[str]:
        path = "" if event.unknown or not raw or has_command(raw) else self.unknown.value(raw)
        mark = event.unknown or (self.files.mark_of(event, path, here=True) if path else "")
        if path and not mark and not Path(event.folder, path).is_dir():
            listing = self.unknown.ask(f'__send "$(__listing "$(<{shlex.quote(path)})")"', 2)[1]
            self.unknown.blocks.add(listing)
            return [GO]
        self.unknown.lose(f"line {event.line} sources {path or raw}, which is not known, and may set it")
        known = "which is not here; what it sets is not known"
        self.notes.append(f"line {event.line} sources {path or raw}, {known}")
        return [SKIP]

    def _read(self, event: Event, rest: list[str]) -> list[str]:
        prints = rest[:1] == ["-v"]
        names = rest[1:2] if prints else read_names(event)
        self.unknown.sets(event, names)
        fed = re.search(r"<<|<\s*[\w.$\"'/{]", event.text) and not re.search(r"<\s*<\(", event.text)
        if not event.unknown and (fed or (prints and not _TIME.search(event.text))):
            return [GO]
        from_where = "prints a time" if prints else "reads it from the input"
        mark = event.unknown or self.unknown.mark(f"line {event.line} {from_where}")
        self.unknown.decide(event, mark)
        self.unknown.pin(names, mark)
        once = prints or self.unknown.seen(event) == 1  # a loop that reads goes round once
        return [SKIP] if once else ["__answer=", GO]


def _set(rest: list[str]) -> list[str]:
    """The script goes on where bash would end it for a program that did not run, or a variable that is not set."""
    kept, left = [], [*rest]
    while left:
        word = left.pop(0)
        if re.fullmatch(r"[-+]\w*o", word) and left and left[0] in _EXPECTED:
            left.pop(0)
            word = word[:-1]
        word = re.sub("[euxvTn]", "", word) if re.fullmatch(r"[-+]\w+", word) else word
        kept += [word] if word not in ("-", "+") else []
    return [f"set {' '.join(kept)}" if kept else ":", SKIP]
