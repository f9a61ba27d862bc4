"""Follows a script that bash runs confined (`confine.py`): the words that each program would get, and the unknown ones.

bash expands everything. A program does not run; its output is a mark, and a value with a mark in it is not known. Before a
command that would lose a mark (a length, a number, a condition), its result becomes a mark, and so does every name that is
assigned where a condition that is not known decides (`blocks.py`). The law: a value is the shell's, or named as not known.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from verl_credit.recipe.adopt.blocks import Blocks
from verl_credit.recipe.adopt.confine import READERS
from verl_credit.recipe.adopt.words import (
    ASSIGNS,
    NAME,
    Use,
    Word,
    assignment,
    elements,
    has_command,
    one_line,
    replaced,
    uses,
    words,
)

GO, SKIP = "__free 0", "__free 1"
MARK = re.compile("\x02(\\d*)\x03?|\x03")
DECLARES = ("declare", "typeset", "export", "local", "readonly")
SHELLS = ("bash", "sh", "zsh", "dash", "ksh")
ELSEWHERE = ("docker", "podman", "ssh", "kubectl")
"""Programs that start a shell on a machine where the script's variables are not set."""
MOST = 500
"""Programs of a script that are noted; a script that starts more is a loop."""
SILENT = (
    "mkdir",
    "touch",
    "rm",
    "rmdir",
    "cp",
    "mv",
    "ln",
    "chmod",
    "chown",
    "sleep",
    "pkill",
    "module",
    "tee",
)
NO_VARIABLES = (
    "activate",
    "conda.sh",
    ".bashrc",
    ".bash_profile",
    ".profile",
    "profile",
    "bashrc",
    "modules.sh",
)
"""Files that a launch sources for its programs; they are taken to set no variable that the launch uses."""
CHANGES = ("RANDOM", "SRANDOM", "SECONDS", "EPOCHSECONDS", "EPOCHREALTIME", "BASHPID", "PPID")
SPECIAL = {
    "$": "the process's number",
    "!": "a process's number",
    "?": "the status of a program that does not run here",
}
OWN = {
    "HOME",
    "PATH",
    "USER",
    "SHELL",
    "IFS",
    "BASH_SOURCE",
    "BASH",
    "BASH_VERSION",
    "PIPESTATUS",
    "FUNCNAME",
    "LINENO",
}
FILES = re.compile(r"-[a-hkprstuwxGLNOS]|-nt|-ot|-ef")


@dataclass(frozen=True)
class Program:
    words: list[str]
    line: int
    place: tuple[str, int, int]
    """The command, its line, and the process: what starts in the background is noted in any order."""
    unknown: dict[str, str] = field(default_factory=dict)
    """A word, as bash expands it or as the script writes it, and why its value is not known."""
    doubtful: tuple[tuple[str, str], ...] = ()
    """Keys that a line sets which does not surely run, and why."""


@dataclass
class _Pending:
    """A command with ``$(...)`` in it, which runs now."""

    text: str
    line: int
    functions: list[str]
    mark: str = ""
    lossy: bool = False


@dataclass
class _Event:
    pid: str
    line: int
    source: str
    depth: int
    functions: list[str]
    folder: str
    text: str


class Follower:
    """Answers the questions of `shell.bash`. ``ask``: runs code in the shell that waits, and returns its fields."""

    def __init__(self, ask: Callable[[str, int], list[str]]) -> None:
        self.ask = ask
        self.programs: list[Program] = []
        self.reasons: list[str] = []
        self.notes: list[str] = []
        self.blocks = Blocks()
        self.written: set[str] = set()
        """The paths that the script writes or hands to a program that does not run."""
        self.branches: list[str] = []
        """Conditions that are not known and decide between several launches."""
        self._stubs: set[str] = set()
        self._pinned: dict[str, str] = {}
        self._keys: dict[str, str] = {}
        self._pending: dict[str, _Pending] = {}
        self._before: dict[str, tuple[str, int]] = {}
        self._status: dict[str, str] = {}
        self._empty: dict[str, str] = {}
        self._parts: dict[str, dict[str, str]] = {}
        self._values: dict[str, dict[str, str]] = {}
        self._doubt = ""
        self._since: set[str] = set()
        self._away: dict[str, str] = {}
        self._unsure: set[str] = set()
        self._positional = ""
        self._main, self._line = "", 0
        self._entering: dict[str, list[str]] = {}
        self._restore: dict[str, list[str]] = {}
        self._settled: dict[str, list[str]] = {}
        self._leaves = False
        self._seen: dict[tuple[str, int], int] = {}
        self._commands: dict[str, tuple[str, int]] = {}
        self._orders: dict[tuple[str, int], list[int]] = {}

    def start(self, pid: str, name: str, listing: str) -> str:
        self._main = self._main or pid
        self.blocks.add(listing)
        which = self._mark("whether a program is there depends on the machine")
        return f"__which={_literal(which)}"

    # -- what is not known

    def _mark(self, why: str) -> str:
        if why not in self.reasons:
            self.reasons.append(why)
        return f"\x02{self.reasons.index(why)}\x03"

    def why(self, text: str) -> str:
        numbers = [number for number in MARK.findall(text) if number and int(number) < len(self.reasons)]
        return self.reasons[int(numbers[0])] if numbers else "it is made of what only a run would know"

    def _states(self, names: Iterable[str]) -> dict[str, str]:
        """What bash declares for each name; "" for one that is not set."""
        listed = [*dict.fromkeys(name for name in names if name not in "?$!-#" and not MARK.search(name))]
        if not listed:
            return {}
        code = []
        for name in listed:
            if name.isdigit():
                code.append(f'builtin printf "%s\\0" "${{{name}+={name} ${{{name}}}}}"')
            elif name in "@*":
                code.append('builtin printf "%s\\0" "=$*"')
            else:
                code.append(f"builtin declare -p {name} 2>/dev/null; builtin printf '\\0'")
        fields = self.ask("{ " + "; ".join(code) + "; } >&201", len(listed))
        return {name: value if "=" in value else "" for name, value in zip(listed, fields, strict=True)}

    def _taint(self, event: _Event, used: list[Use]) -> tuple[dict[str, str], dict[str, str], list[str]]:
        """(names that are not known with their marks, names that are not set, code that makes the marks their values)"""
        if found := MARK.search(event.text):  # the text of `bash -c`
            used.append(Use(found[0], 0, 0, True))
        states = self._states(one.name for one in used)
        tainted: dict[str, str] = {}
        code: list[str] = []
        for one in used:
            name, state = one.name, states.get(one.name, "")
            if MARK.search(name):
                tainted[name] = name
            elif "\x02" in state or "\x03" in state or "\\002" in state or "\\003" in state:
                found = re.search("(?:\x02|\\\\002)(\\d+)", state)
                tainted[name] = (
                    f"\x02{found[1]}\x03" if found else self._mark("it is made of what only a run would know")
                )
            elif (
                self._positional and (name in ("@", "*", "#") or name.isdigit()) and len(event.functions) < 2
            ):
                tainted[name] = self._positional
            elif name in SPECIAL:
                if name != "?" or self._status.get(event.pid):
                    tainted[name] = (
                        self._status.get(event.pid, "")
                        if name == "?"
                        else self._mark(f"it is {SPECIAL[name]}")
                    )
            elif name in CHANGES and name not in self._since:
                tainted[name] = self._mark(f"{name} differs each time")
                code.append(f"unset {name}; {name}={_literal(tainted[name])}")
            elif name in ("PWD", "OLDPWD") and self._is_away(event.pid):
                tainted[name] = self._is_away(event.pid)
                code.append(f"{name}={_literal(tainted[name])}")
            elif (
                self._doubt
                and re.fullmatch(NAME, name)
                and name not in self._since | OWN
                and not name.startswith("__")
            ):
                tainted[name] = self._doubt
                code.append(f"{name}={_literal(self._doubt)}")
        missing = {}
        for one in used:
            name = one.name
            if name in tainted or one.default or name in ("@", "*", "#", "-", "?", "$", "!", "0"):
                continue
            if name in self._empty:
                missing[name] = self._empty[name]
            elif not states.get(name) and not self._is_array(name):
                missing[name] = self._absent(name, event)
        return tainted, missing, code

    def _is_array(self, name: str) -> bool:
        return name in self._parts or name in (
            "BASH_SOURCE",
            "FUNCNAME",
            "PIPESTATUS",
            "BASH_REMATCH",
            "BASH_ARGV",
        )

    def _absent(self, name: str, event: _Event) -> str:
        if name.isdigit():
            of = "the script" if len(event.functions) < 2 else event.functions[0]
            return f"argument {name} of {of} is not given (line {event.line})"
        if name in self.blocks.assigned:
            return f"{name} is not set in line {event.line}; the script sets it where this run did not come"
        return f"{name} (line {event.line}) is set neither in the script nor in the environment"

    def _is_away(self, pid: str) -> str:
        return self._away.get(pid) or self._away.get("", "")

    def _flag(self, event: _Event, mark: str, lossy: bool) -> None:
        for pid, pending in self._pending.items():
            if pid != event.pid:
                pending.mark, pending.lossy = pending.mark or mark, pending.lossy or lossy

    def _decide(self, event: _Event, mark: str, *, test: bool) -> list[str]:
        """What the condition decides is not known any more. ``test``: a command that is there to decide."""
        self._status[event.pid] = mark
        found = [self.blocks.behind(event.text), *map(self.blocks.behind, event.functions)]
        if test and not self.blocks.knows(event.text):
            self._lose(f"line {event.line} decides by what is not known: {self.why(mark)}")
        code = []
        for one in filter(None, found):
            why = f"line {event.line} sets it only under a condition that is not known: {self.why(mark)}"
            own = self._mark(why)
            for name in sorted(one.names - OWN):
                self._pinned.setdefault(name, own)
                self._since.add(name)
                code.append(f"{name}={_literal(own)}")
            for key in one.keys:
                self._keys.setdefault(key, why)
            self._leaves |= one.ends
            self._unsure |= one.sources | one.shifts
            if one.sources:
                self._lose(why)
            if one.shifts:
                self._positional = own
            if one.launches > 1:
                self.branches.append(f"line {event.line}: {self.why(mark)}")
        return [f"{{ {'; '.join(code)}; }} 2>/dev/null"] if code else []

    def _lose(self, why: str) -> None:
        """From here on every variable is doubtful until the script sets it."""
        self._doubt, self._since = self._mark(why), set()

    def in_order(self) -> list[Program]:
        """The programs in the order of the script's commands."""
        found: list[tuple[int, Program]] = []
        for place, orders in self._orders.items():
            started = sorted(
                (one for one in self.programs if one.place[:2] == place), key=lambda one: one.place[2]
            )
            found += zip(orders, started, strict=False)
        return [program for _, program in sorted(found, key=lambda pair: pair[0])]

    # -- events

    def program(self, pid: str, mark: str, given: list[str]) -> str:
        """A program of the script, with the words that bash made. Returns what happens in its place."""
        name = os.path.basename(given[0])
        place, why = self._commands.get(pid) or self._commands[""], {}
        for word in given:
            if MARK.search(word):
                why[word] = self.why(word)
            elif "\udc80" <= max(word, default="") <= "\udcff":
                why[word] = "it is not UTF-8"
        why |= {
            word: reason
            for word, reason in self._values.get(pid, self._values.get("", {})).items()
            if word in given
        }
        pending = self._pending.get(pid)
        if pending and pending.mark:
            for raw in (one.text for one in words(pending.text) if has_command(one.text)):
                stem = re.split(r"\$\(|`", raw.strip("\"'"))[0]
                why |= {
                    word: self.why(pending.mark)
                    for word in given
                    if word.startswith(stem) and word not in why
                }
        self.programs.append(Program(given, place[1], (*place, int(pid)), why, tuple(self._keys.items())))
        self.written |= {os.path.normpath(word) for word in given[1:] if not word.startswith("-")}
        output = "" if name in SILENT or not mark else f"builtin printf '%s\\n' {_literal(mark)}"
        inner = self._shell_in(name, given)
        self._line = place[1]
        return f"{inner}; {output or ':'}" if inner else output or ":"

    def _shell_in(self, name: str, given: list[str]) -> str:
        """The code that starts the shell which stands in the words of a program."""
        if name.endswith(".sh"):
            given = ["bash", *given]
        place = next((n for n, word in enumerate(given) if os.path.basename(word) in SHELLS), None)
        clean = name in ELSEWHERE
        rest: list[str] | None = None
        if place is not None:
            rest = [
                re.sub(r"^-([a-z]*)$", lambda m: "-" + re.sub("[lip]", "", m[1]), word)
                for word in given[place + 1 :]
            ]
            rest = [word for word in rest if word not in ("-", "--login", "-o", "pipefail")]
        elif not name.startswith(("python", "git", "echo")):
            texts = [
                w for w in given[1:] if re.search(r"\s", w) and re.search(r"\b(?:python|torchrun)\S*\s", w)
            ]
            rest = ["-c", texts[-1].removeprefix("--wrap=")] if texts else None
            if name == "sbatch" and rest is None:
                file = next(
                    (n for n, word in enumerate(given) if n and word.endswith((".sh", ".slurm", ".sbatch"))),
                    None,
                )
                rest = given[file:] if file is not None else None
        if rest is None or len(self.programs) > MOST:
            return ""
        start = '"$BASH"'
        if clean:
            start = 'builtin command -p env -i "PATH=$PATH" "BASH_ENV=$BASH_ENV" "HOME=$HOME" "$BASH"'
        return f"{start} {shlex.join(rest)}"

    def event(self, pid, line, source, depth, functions, folder, text) -> str:
        line = int(line) if source not in ("", "environment") else self._line
        event = _Event(pid, line, source, int(depth), functions.split(), folder, text)
        if pid not in self._before and (code := self._inherited(event)):
            self._run(code)
        before, self._before[pid] = self._before.get(pid), (text, event.depth)
        entered = before is not None and before[0] == text and before[1] == event.depth - 1
        if event.functions and event.functions[0] in self._stubs:
            self._commands[pid] = self._commands.get(text, (text, event.line))
            if text != '"$@"':
                return GO
        if entered or text in self._entering:
            code = self._enter(event)
        else:
            code = self._settled[pid] = self._settle(event)
        if code:
            self._run(code)
        if entered or (event.functions and event.functions[0] in ("command", "exec") and text != '"$@"'):
            return GO
        answer = self._answer(event)
        if answer[-1] == GO and (changed := {*re.findall(NAME, text)} & self._pinned.keys()):
            self._restore.setdefault(pid, []).extend(
                f"{name}={_literal(self._pinned[name])}" for name in sorted(changed)
            )
        return "; ".join(answer)

    def _run(self, code: list[str]) -> None:
        self.ask("; ".join([*code, "builtin printf '\\4\\0' >&201"]), -1)

    def _inherited(self, event: _Event) -> list[str]:
        """A subshell starts with the values of its parent, which may not have come to its next command."""
        try:
            parent = Path(f"/proc/{event.pid}/stat").read_text().rpartition(")")[2].split()[1]
        except OSError:
            return []
        pending = self._pending.get(parent)
        code = [*self._settled.get(parent, []), *self._restore.get(parent, [])]
        if pending and pending.mark and not _is_condition(pending.text):
            code += [
                f"{assignment(word.text)[0]}={_literal(pending.mark)}" for word in _assignments(pending.text)
            ]
        return code

    def _enter(self, event: _Event) -> list[str]:
        """A function starts with arguments that are made of what is not known."""
        code = self._entering.pop(event.text, [])
        pending = self._pending.get(event.pid)
        if pending and pending.mark:
            (given,) = self.ask("builtin printf '%s\\0' \"$*\" >&201", 1)
            if pending.lossy or not MARK.search(given):
                code = [*code, f'set -- "${{@/*/{pending.mark}}}"']
        return code

    def _settle(self, event: _Event) -> list[str]:
        """The last command of this shell had ``$(...)`` in it whose output is not known."""
        pending = self._pending.pop(event.pid, None)
        code = self._restore.pop(event.pid, [])
        if pending is None or not pending.mark:
            return code
        if _is_condition(pending.text):
            self._before.pop(event.pid, None)
            return code + self._decide(
                _Event(event.pid, pending.line, "", 0, pending.functions, "", pending.text),
                pending.mark,
                test=True,
            )
        for word in _assignments(pending.text):
            name = assignment(word.text)[0]
            if has_command(word.text) and (pending.lossy or "\x02" not in self._plain(name)):
                code.append(f"{name}={_literal(pending.mark)}")
        if code:
            self._status[event.pid] = pending.mark
        return code

    def _plain(self, name: str) -> str:
        return self._states([name])[name].replace("\\002", "\x02").replace("\\003", "\x03")

    def _answer(self, event: _Event) -> list[str]:
        text = event.text
        if has_command(text):
            self._pending[event.pid] = _Pending(text, event.line, event.functions)
        used = list(uses(text))
        if text.startswith("((") or text.startswith("let "):
            return self._arithmetic(event)
        if _is_condition(text) and not text.startswith(("[ ", "test ")):
            return self._condition(event, used)
        status, self._status[event.pid] = self._status.get(event.pid, ""), ""
        if status and any(one.name == "?" for one in used):
            self._status[event.pid] = status
        given = words(text)
        lead = len(_assignments(text, leading=True))
        if lead == len(given) or (given and given[lead].text in DECLARES):
            return self._assignment(event, used, given)
        return self._command(event, used, given[lead:])

    def _arithmetic(self, event: _Event) -> list[str]:
        names = dict.fromkeys(re.findall(NAME, event.text.removeprefix("let ")))
        tainted, _, code = self._taint(event, [Use(name, 0, 0, False) for name in names])
        assigned = _assigned_in(event.text)
        self._note_assigned(event, assigned)
        if tainted:
            mark = next(iter(tainted.values()))
            code += [f"{name}={_literal(mark)}" for name in assigned]
            code += self._decide(event, mark, test=False)
            self._flag(event, mark, True)
        elif mark := next((self._pinned[name] for name in assigned if name in self._pinned), ""):
            code += [f"{name}={_literal(mark)}" for name in assigned]
            return [*code, *self._decide(event, mark, test=False), SKIP]
        return [*code, GO]

    def _condition(self, event: _Event, used: list[Use]) -> list[str]:
        if event.text.startswith("[["):
            names = re.findall(
                rf"(?<![\w$\"'{{./-])({NAME})(?= -(?:eq|ne|lt|le|gt|ge) )|-(?:eq|ne|lt|le|gt|ge) ({NAME})",
                event.text,
            )
            names += [(name, "") for name in re.findall(rf"-v ({NAME})", event.text)]
            used += [Use(name, 0, 0, False, True) for pair in names for name in pair if name]
        tainted, _, code = self._taint(event, used)
        self._status[event.pid] = ""
        if match := re.match(rf"(?:for|select) ({NAME})", event.text):
            self._note_assigned(event, [match[1]])
        if not tainted and (why := self._tests_files(event)):
            tainted = {"": why}
        if tainted:
            mark = next(iter(tainted.values()))
            code += self._decide(event, mark, test=True)
            self._flag(event, mark, True)
        return [*code, GO]

    def _tests_files(self, event: _Event) -> str:
        """Why a test of a file may come out otherwise in the launch."""
        if not (FILES.search(event.text) and re.match(r"\[|test", event.text)):
            return ""
        given = [word.text for word in words(event.text)]
        found = [given[n + 1] for n, word in enumerate(given[:-1]) if FILES.fullmatch(word)]
        return self._files_change(event, [one for one in found if not has_command(one)])

    def _files_change(self, event: _Event, raw: list[str]) -> str:
        if raw and self._is_away(event.pid):
            return self._is_away(event.pid)
        for path in self._expanded(raw):
            path = os.path.normpath(path)
            if any(
                path == one or path.startswith(f"{one}/") or one.startswith(f"{path}/")
                for one in self.written
                if one != "."
            ):
                return self._mark(f"the script itself makes or changes {path}")
        return ""

    def _expanded(self, raw: list[str]) -> list[str]:
        if not raw:
            return []
        code = "; ".join(f"builtin printf '%s\\0' {one}" for one in raw)
        return self.ask(f"{{ {code}; builtin printf '\\4\\0'; }} >&201 2>/dev/null", -1)

    def _note_assigned(self, event: _Event, names: Iterable[str]) -> None:
        """A name in a function may be the function's own, and the script's stays doubtful."""
        if len(event.functions) < 2:
            self._since |= {*names}

    def _assignment(self, event: _Event, used: list[Use], given: list[Word]) -> list[str]:
        declares = given[0].text if given and given[0].text in DECLARES else ""
        integers = bool(declares) and any(re.fullmatch(r"-\w*i\w*", word.text) for word in given[1:])
        assigned = [word for word in given if ASSIGNS.match(word.text)]
        if integers:
            for word in assigned:
                used += [
                    Use(name, word.start + assignment(word.text)[2], word.end, False)
                    for name in re.findall(NAME, word.text[assignment(word.text)[2] :])
                ]
        tainted, missing, code = self._taint(event, used)
        spans = [
            (one.start, one.end, tainted[one.name]) for one in used if one.name in tainted and _loses(one)
        ]
        names = []
        for word in assigned:
            name, appends, value_at = assignment(word.text)
            names.append(name)
            self._hollow(event, word, name, appends, missing)
            if name in self._pinned:
                mark = self._pinned[name]
                value = f"({mark})" if word.text.startswith("(", value_at) else mark
                spans.append((word.start, word.end, f"{name}={value}"))
                self._pending.pop(event.pid, None)
        if tainted:
            self._flag(event, next(iter(tainted.values())), "|" in event.text)
        self._note_assigned(event, names)
        if not spans:
            return [*code, GO]
        if integers:
            code.append("declare +i " + " ".join(names))
        changed = replaced(event.text, spans)
        if integers:
            changed = re.sub(r"(\s-\w*)i", r"\1", changed, count=1)
        if has_command(changed):  # its commands would not be seen
            mark = next(
                iter([*tainted.values(), *(self._pinned[one] for one in names if one in self._pinned)])
            )
            changed = "; ".join(f"{name}={_literal(mark)}" for name in names)
        return [*code, changed, SKIP]

    def _hollow(self, event: _Event, word: Word, name: str, appends: bool, missing: dict[str, str]) -> None:
        """Remembers which values are empty because a variable is not set."""
        items = elements(word.text)
        if not appends:
            self._empty.pop(name, None)
            self._parts.pop(name, None)
        if items is not None:
            parts = self._parts.setdefault(name, {})
            for item in items:
                why = _why_empty(item, missing)
                if why and not has_command(item):
                    parts.update(dict.fromkeys(self._expanded([item]), why))
                for one in uses(item):
                    parts.update(self._parts.get(one.name, {}))
        elif why := _why_empty(word.text, missing):
            self._empty[name] = why

    def _command(self, event: _Event, used: list[Use], given: list[Word]) -> list[str]:
        if not given:
            return [GO]
        tainted, missing, code = self._taint(event, used)
        name = given[0].text
        rest = [word.text for word in given[1:]]
        if not re.fullmatch(r"[\w./:+@%,~\[-]+", name):
            name = next(iter(self._expanded([name])), "") if not has_command(name) else ""
            if MARK.search(name):
                code += self._decide(event, (tainted and next(iter(tainted.values()))) or "", test=False)
                return [*code, f"__program '' {event.text[given[0].start :]}", SKIP]
        (kind,) = (
            self.ask(f"{{ builtin type -t -- {shlex.quote(name)}; builtin printf '\\0'; }} >&201", 1)
            if name
            else ("",)
        )
        kind = kind.strip()
        made = [one for one in used if one.name in tainted and _loses(one)]
        mark = next(iter(tainted.values()), "")
        if mark:
            self._flag(event, mark, True)
        if name in self._stubs and name not in self.blocks.functions:
            kind = ""
        if kind == "function" and name != "command":
            if not made:
                return [*code, GO]
            back = [
                f"{one.name}={_literal(tainted[one.name])}" for one in made if re.fullmatch(NAME, one.name)
            ]
            self._entering[event.text] = [*back, f'set -- "${{@/*/{mark}}}"']
            self._restore[event.pid] = back
            return [*code, *(f"{one.name}=1" for one in made if re.fullmatch(NAME, one.name)), GO]
        if kind in ("builtin", "keyword") or name == "command":
            return [*code, *self._builtin(event, name, rest, used, tainted, mark)]
        if name in READERS and kind == "file":
            return [*code, *self._reader(event, name, rest, mark)]
        return [*code, *self._stub(event, name, given, made, tainted, missing)]

    def _reader(self, event: _Event, name: str, rest: list[str], mark: str) -> list[str]:
        raw = [one for one in rest if not one.startswith("-") and not has_command(one)]
        mark = mark or self._files_change(event, raw)
        if not mark and name in ("cat", "ls", "head", "tail", "wc", "sort", "sed", "grep", "awk", "cut"):
            paths = [one for one in self._expanded(raw) if one and not one.startswith("-")]
            named = (
                paths
                if name in ("cat", "ls")
                else [one for one in paths[-1:] if re.fullmatch(r"[\w./+@-]*/[\w./+@-]+", one)]
            )
            if lost := [one for one in named if not Path(event.folder, one).exists()]:
                mark = self._mark(f"{lost[0]}, which {name} reads in line {event.line}, is not here")
        if not mark:
            return [GO]
        self._flag(event, mark, False)
        return [*self._decide(event, mark, test=False), f"builtin printf '%s\\n' {_literal(mark)}", SKIP]

    def _builtin(self, event, name, rest, used, tainted, mark) -> list[str]:
        if one_line(event.text) in self._unsure:
            if name not in ("set", "shift"):
                self._lose(f"line {event.line} may set it, and does not surely run")
            return [SKIP]
        made = any(one.name in tainted and _loses(one) for one in used)
        if name in ("[", "test"):
            return self._condition(event, used)
        if name in ("enable", "kill", "suspend", "bind", "trap") and (
            name != "trap" or {"DEBUG", "RETURN"} & {*rest}
        ):
            return [SKIP]
        if name == "exit" and self._leaves:
            self._leaves = False
            self.notes.append(f"line {event.line} may end the script; here it goes on")
            return [SKIP]
        if name == "exec":
            code = 'exec() { "$@"; builtin exit; }' if rest else "unset -f exec"
            return [code, GO]
        if name == "set" and rest and rest[0][0] in "-+" and rest[0] != "--":
            return self._set(rest)
        if name in ("cd", "pushd", "popd"):
            return self._cd(event, rest, mark)
        if name in ("pwd", "dirs") and self._is_away(event.pid):
            self._flag(event, self._is_away(event.pid), False)
            return [f"builtin printf '%s\\n' {_literal(self._is_away(event.pid))}", SKIP]
        if name in ("source", "."):
            return self._source(event, rest, mark)
        if name in ("read", "mapfile", "readarray") or (name == "printf" and rest[:1] == ["-v"]):
            return self._read(event, name, rest, mark)
        if name in ("type", "hash", "compgen"):
            mark = mark or self._mark("whether a program is there depends on the machine")
        elif name == "command":
            return [GO]
        elif name == "unset":
            self._note_assigned(event, rest)
            pinned = [f"{one}={_literal(self._pinned[one])}" for one in rest if one in self._pinned]
            return [*pinned, SKIP] if pinned else [GO]
        elif name == "eval" and mark:
            self._lose(f"line {event.line} evaluates a text that is not known: {self.why(mark)}")
            return [SKIP]
        elif not (made and mark):
            return [GO]
        self._flag(event, mark, False)
        return [*self._decide(event, mark, test=False), f"builtin printf '%s\\n' {_literal(mark)}", SKIP]

    def _set(self, rest: list[str]) -> list[str]:
        """The script goes on where bash would end it for a program that did not run, or a variable that is not set."""
        kept, skip = [], False
        for n, word in enumerate(rest):
            if skip:
                skip = False
            elif (
                re.fullmatch(r"[-+]\w*o", word)
                and rest[n + 1 : n + 2]
                and rest[n + 1] in ("errexit", "nounset", "xtrace", "functrace")
            ):
                skip = True
                kept += [word[:-1]] if len(word) > 2 else []
            else:
                kept.append(re.sub("[euxvTn]", "", word) if re.fullmatch(r"[-+]\w+", word) else word)
        kept = [word for word in kept if word not in ("-", "+")]
        return [f"set {' '.join(kept)}" if kept else ":", SKIP]

    def _cd(self, event: _Event, rest: list[str], mark: str) -> list[str]:
        self._status[event.pid] = ""
        raw = [one for one in rest if not one.startswith("-")]
        if not mark and raw and not has_command(raw[-1]):
            folder = next(iter(self._expanded(raw[-1:])), "")
            if Path(event.folder, folder).is_dir():
                if folder.startswith("/"):
                    self._away.pop("" if event.pid not in self._away else event.pid, None)
                if not self._is_away(event.pid):
                    return [GO]
                return [SKIP]
            mark = self._mark(f"line {event.line} goes to the folder {folder}, which is not here")
        if not mark:
            return [GO]
        self._away[event.pid] = mark
        if event.pid == self._main:
            self._away[""] = mark
        return [SKIP]

    def _source(self, event: _Event, rest: list[str], mark: str) -> list[str]:
        raw = rest[:1]
        path = "" if mark or not raw or has_command(raw[0]) else next(iter(self._expanded(raw)), "")
        mark = mark or self._files_change(event, raw if path else [])
        if path and not mark and Path(event.folder, path).is_file():
            quoted = shlex.quote(path)
            listing = self.ask(f'__send "$(__listing "$(<{quoted})")"', 2)[1]
            self.blocks.add(listing)
            return [GO]
        if os.path.basename(path or raw[0].strip("\"'") if raw else "") not in NO_VARIABLES:
            name = path or (raw[0] if raw else "")
            self._lose(f"{name}, which line {event.line} sources, is not here, and may set it")
            self.notes.append(
                f"line {event.line}: {name} is sourced and is not here; what it sets is not known"
            )
        return [SKIP]

    def _read(self, event: _Event, name: str, rest: list[str], mark: str) -> list[str]:
        names = [one for one in rest if re.fullmatch(NAME, one)] or (
            ["REPLY"] if name == "read" else ["MAPFILE"]
        )
        self._note_assigned(event, names)
        fed = re.search(r"<<|<\s*[\w.$\"'/{]", event.text) and not re.search(r"<\s*<\(", event.text)
        if not (mark or (name != "printf" and not fed)):
            return [GO]
        mark = mark or self._mark(f"line {event.line} reads it from the input")
        return [
            *self._decide(event, mark, test=False),
            *(f"{one}={_literal(mark)}" for one in names),
            *([SKIP] if mark and name == "printf" else []),
            *([] if name == "printf" else self._end_of_input(event, names, mark)),
        ]

    def _end_of_input(self, event: _Event, names: list[str], mark: str) -> list[str]:
        """A loop that reads goes round once."""
        for name in names:
            self._pinned.setdefault(name, mark)
        seen = self._seen[event.text, event.line] = self._seen.get((event.text, event.line), 0) + 1
        return [SKIP] if seen == 1 else ["__answer=", GO]

    def _stub(self, event, name, given, made, tainted, missing) -> list[str]:
        """A program that does not run here."""
        mark = self._mark(f"it is the output of {os.path.basename(name) or 'a program'} (line {event.line})")
        for other in tainted.values():
            mark = mark or other
        code = self._decide(event, mark, test=False)
        self._flag(event, mark, False)
        place = event.text, event.line
        self._commands |= dict.fromkeys((event.pid, event.text, ""), place)
        self._orders.setdefault(place, []).append(sum(map(len, self._orders.values())))
        silent = os.path.basename(name) in SILENT or re.search(r"(?:^|\s)(?:1|&)?>>?\s*[^&\s]", event.text)
        shown = "" if silent else mark
        values: dict[str, str] = {}
        for word in given[1:]:
            why = _why_empty(word.text, missing)
            if why and not has_command(word.text):
                values |= dict.fromkeys(self._expanded([word.text]), why)
            for one in uses(word.text):
                values |= self._parts.get(one.name, {})
        self._values[event.pid] = self._values[""] = values
        seen = self._seen[event.text, event.line] = self._seen.get((event.text, event.line), 0) + 1
        start = given[0].start
        if made:
            spans = [(one.start, one.end, tainted[one.name]) for one in made]
            spans += [(w.start, w.end, mark) for w in given[1:] if has_command(w.text)]
            changed = replaced(event.text, spans)[start:]
            return [*code, f"__free 0; __program {_literal(shown)} {changed}; __lock", SKIP]
        if not re.fullmatch(r"[\w./:+@%,-]+", name):
            return [*code, GO]
        self._stubs.add(name)
        status = f"builtin return {int(seen > 3)}"
        return [*code, f'{name} () {{ __program {_literal(shown)} {name} "$@"; {status}; }}', GO]


def _literal(text: str) -> str:
    return f"'{text}'"


def _loses(one: Use) -> bool:
    """May the expansion of a value with a mark have no mark?"""
    return not one.plain or one.indexed


def _why_empty(text: str, missing: dict[str, str]) -> str | None:
    return next((missing[one.name] for one in uses(text) if one.name in missing and not one.default), None)


def _is_condition(text: str) -> bool:
    return re.match(r"\[\[? |test |case |for |select ", text) is not None


def _assignments(text: str, leading: bool = False) -> list[Word]:
    found = []
    for word in words(text):
        if ASSIGNS.match(word.text):
            found.append(word)
        elif leading:
            break
    return found


def _assigned_in(text: str) -> list[str]:
    found = re.findall(
        rf"({NAME})\s*(?:[-+*/%&|^]|<<|>>)?=(?!=)|({NAME})(?:\+\+|--)|(?:\+\+|--)({NAME})", text
    )
    return [name for names in found for name in names if name]
