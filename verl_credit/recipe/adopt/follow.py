"""Follows a script that bash runs confined (`confine.py`): the words that each program would get, and the unknown ones.

bash expands everything. A program does not run; its output is a mark, and a value with a mark in it is not known. Before a
command that would lose a mark (a length, a number, a condition), its result becomes a mark, and so does every name that is
assigned where a condition that is not known decides (`blocks.py`). The law: a value is the shell's, or named as not known.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

from verl_credit.recipe.adopt.builtin import Builtins
from verl_credit.recipe.adopt.confine import CONTENTS, READERS
from verl_credit.recipe.adopt.inner_environment import EXPORTS, directive_of
from verl_credit.recipe.adopt.input_words import with_input
from verl_credit.recipe.adopt.marks import MARK, Reason
from verl_credit.recipe.adopt.opened import Files, parent
from verl_credit.recipe.adopt.programs import PYTHON, SILENT, Program, doubt_of, is_script, shell_in
from verl_credit.recipe.adopt.spelled import spelled
from verl_credit.recipe.adopt.unknown import CHANGES, GLOB, GO, SKIP, Event, Unknown, marked
from verl_credit.recipe.adopt.words import (
    ASSIGNS,
    DECLARES,
    NAME,
    Use,
    Word,
    assignment,
    elements,
    has_command,
    replaced,
    uses,
)
from verl_credit.recipe.adopt.words import words as words_of

MOST = 500
"""Programs of a script whose shells are followed; a script that starts more is a loop."""
_PLAIN = re.compile(r"[\w./:+@%,~\[-]+")
_KEYED = re.compile(r"[\w.+~@/-]+=")
_DIFFERS = re.compile(
    r"(?s)uname .*-\w*[anrvmpi]|awk .*((rand|time|system) ?\(|getline)|sort .*-(\w*R|-.*random)"
)
"""A program that reads, and whose output is another one on another machine, or each time."""
HOST = Reason("HOSTNAME is another one where the launch runs", variable="HOSTNAME")
_COMPUTED = re.compile(r"\$(\(\(|\[).*(\$\((?!\()|`)", re.DOTALL)
"""Arithmetic with a program's output, which is an error for bash where the output is a mark."""
_COMPARED = re.compile(
    rf"(?<![\w$\"'{{./-])({NAME})(?= -(?:eq|ne|lt|le|gt|ge) )|-(?:eq|ne|lt|le|gt|ge|v) ({NAME})"
)
_CHANGED = re.compile(
    rf"({NAME})(?:\[[^]]*\])?\s*(?:[-+*/%&|^]|<<|>>)?=(?!=)|({NAME})(?:\+\+|--)|(?:\+\+|--)({NAME})"
)


class Follower:
    """Answers the questions of `shell.bash`. ``ask``: runs code in the shell that waits, and returns its fields."""

    def __init__(self, ask: Callable[[str, int], list[str]]) -> None:
        self.programs: list[Program] = []
        self.unknown = Unknown(ask)
        self.files = Files(self.unknown)
        self.notes: list[str] = []
        self.builtins = Builtins(self.unknown, self.files, self.notes)
        self._mark = self.unknown.mark
        self._started: list[tuple[Event, list[str] | None]] = []
        self._stubs: set[str] = set()
        self._entering: dict[str, tuple[str, list[str]]] = {}
        self._line = 0

    def start(self, pid: str, name: str, listing: str) -> str:
        """A shell starts with a script."""
        self.unknown.shells.add(pid)
        self.unknown.blocks.add(listing)
        host = f"[[ ${{HOSTNAME@a}} == *x* ]] || {marked('HOSTNAME', self._mark(HOST))}"
        return f"unset {' '.join(CHANGES)}; {host}"

    def program(self, pid: str, mark: str, order: str, *given: str) -> str:
        """A program of the script, with the words that bash made. Returns what happens in its place."""
        event, known = self._started[int(order)]
        output = f"a program's output is in line {event.line}"
        words, left, made = [*given], Counter(known or ()), sum(has_command(one.text) for one in event.words)
        why = {word: self.unknown.hollow[word] for word in given if word in self.unknown.hollow}
        for n, word in enumerate(given):
            left[word] -= 1
            if MARK.search(word):
                why[word] = self._mark.why(word)
            elif event.mark and known is not None and left[word] < 0:
                words[n] = word.partition("=")[0] + f"={event.mark}" if "=" in word else event.mark
                why[words[n]] = self._mark.why(event.mark) if made == 1 else output
            elif "\udc80" <= max(word, default="") <= "\udcff":
                why[word] = "it is not UTF-8"
        mark_read = self._mark(f"{os.path.basename(given[0])} of line {event.line} makes it of what it reads")
        words = with_input(words, mark_read)
        self.unknown.several.add(mark_read)
        spaced = any(" " in word for word in {*words} - {*given})
        words = spelled(words)
        scripts = [word for word in words if is_script(word, event.folder)]
        if (name := next((one for one in words if one in EXPORTS), "")) and "--export" not in " ".join(words):
            batch = next((_text(event.folder, one) for one in scripts if name == "sbatch"), "")
            export = self.unknown.value(f'"${{{EXPORTS[name]}-}}"') or directive_of(batch)[1]
            words[(at := words.index(name) + 1) : at] = [f"--export={export}"] * bool(export)
        why |= {word: self._mark.why(mark_read) for word in words if mark_read in word}
        keys = tuple(self.unknown.keys.items())
        self.programs.append(Program(words, event.line, int(order), why, keys, self._fork(pid)))
        self._line = event.line
        inner = shell_in(words, event.folder) if len(self.programs) <= MOST else ""
        if MARK.fullmatch(given[0]):
            why_not = self._mark.why(given[0])
            self.notes.append(f"line {event.line} runs a command that is not known: {why_not}")
        if mark_read in "".join(words) and (inner or PYTHON.search(" ".join(words))):
            often = "as often as what it reads says; here it is once"
            self.notes.append(f"line {event.line} starts a program {often}")
        if inner and (spaced or ("<<" in event.text and event.hides)):
            self.unknown.branches.append(f"{output}, and a shell runs it")
            inner = ""
        if inner and (doubt := doubt_of(words, event.folder)):
            self.unknown.lose(f"line {event.line} {doubt}")
        code = _files(f"{self.unknown.blocks.before(event.text)} {event.text}") if inner else ()
        marks = [self.files.mark_of(event, word) for word in scripts if inner]
        marks.append(self.files.made(event, code))
        if made_here := next(filter(None, marks), ""):
            why_not = self._mark.why(made_here)
            self.notes.append(f"line {event.line} starts a script that is not read, because {why_not}")
            inner = ""
        for word in () if inner else given[1:]:
            if not word.startswith("-") and word not in (".", "..", "/"):
                self.files.writes(event, word)
        silent = os.path.basename(given[0]) in SILENT
        return "; ".join([GO, *[inner] * bool(inner), ":" if silent else f"builtin printf '%s\\n' '{mark}'"])

    def _fork(self, pid: str) -> int:
        """The child of the script's own shell that this process is, or is in; 0 where it is that shell."""
        main, child = next(iter(self.unknown.last)), ""
        while pid and pid != main:
            child, pid = pid, parent(pid)
        return int(child) if child and pid else 0

    def event(self, pid: str, line: str, source: str, folder: str, text: str, *functions: str) -> str:
        """A simple command is about to run. Returns code: what prepares it, and whether it runs."""
        in_file = source not in ("", "environment", "main")  # "main": a function of `bash -s`
        calls = [*functions[: -1 if in_file else None]]  # the last one is bash's own "main"
        event = Event(pid, int(line) if in_file else self._line, calls, folder, text)
        if calls and calls[0] in self._stubs:
            return GO
        before, of = self.unknown.last.get(pid), parent(pid)
        copied = (one for one in reversed(self.unknown.running) if (one.pid, one.text) == (of, text))
        call = before or next(copied, None)  # in a pipeline it starts in a copy of the shell
        if call and call.text == text and call.functions == calls[1:] != calls:  # a function starts
            call.functions = calls if before else call.functions
            self.unknown.run(self._entered(call))
            return GO
        if before:  # the call starts in a copy of this shell, which has its arguments
            self.unknown.run(self._entering.get(before.text, ("", []))[1])
        self.files.settle(event)
        here = (one for one in self.unknown.running if (one.pid, one.line) == (of, event.line))
        evals = (one for one in here if one.text.startswith("eval "))
        last = before or next(evals, self.unknown.last.get(of))
        if not before and last and last.before and not any(ASSIGNS.match(one.text) for one in last.words):
            self.unknown.run(self._settled(last.before, pid))  # this copy may be older than its last command
        self.unknown.run(self._settled(last, pid))
        event.status, event.before = self.unknown.status.pop(pid, ""), before
        if before:
            before.before = None
        self.unknown.last[pid] = event
        if has_command(text):
            self.unknown.running.append(event)
        inside = calls[:1] in (["command"], ["exec"]) and text != '"$@"'
        return GO if inside else "; ".join(self._answer(event))

    def _settled(self, event: Event | None, pid: str) -> list[str]:
        """Code for what the last command has done, of this shell or of the one that it is a copy of."""
        if event is None or not event.mark or (event.settled and event.pid == pid):
            return []
        mark, hides = event.mark, event.hides
        event.settled |= event.pid == pid
        if event.is_condition:
            self.unknown.decide(event, mark, test=True)
            return []
        if hides and event.text.startswith("eval "):
            self.unknown.pin(re.findall(rf"({NAME})=", event.text), mark)
            if PYTHON.search(event.text):
                why = f"a program's output is in line {event.line}, which evaluates it"
                self.unknown.branches.append(why)
        self._may_set_any(event, mark, has_command)
        found = [one.text for one in event.words if ASSIGNS.match(one.text)]
        names = [assignment(one)[0] for one in found if has_command(one) or GLOB.search(one)]
        if names:
            self.unknown.status[pid] = mark
        return [marked(name, mark, unless_marked=not event.lossy) for name in names]

    def _may_set_any(self, event: Event, mark: str, unknown: Callable[[str], bool]) -> None:
        """`export "$name=1"` and `export $(cat file)` set a name that is not known."""
        given = [one.text for one in event.words]
        if given[0] in DECLARES and any(unknown(one) for one in given[1:] if not ASSIGNS.match(one)):
            self.unknown.lose(f"line {event.line} may set it: {self._mark.why(mark)}")

    def _entered(self, event: Event) -> list[str]:
        """Code for a function's arguments, where they are made of what is not known."""
        mark, code = self._entering.pop(event.text, (event.mark if event.hides else "", []))
        return [*code, f'set -- "${{@/*/{mark}}}"'] if mark else code

    def _answer(self, event: Event) -> list[str]:
        if event.text.startswith(("((", "let ")):
            return self._arithmetic(event)
        if event.is_condition:
            return self._condition(event)
        lead = next((n for n, one in enumerate(event.words) if not ASSIGNS.match(one.text)), len(event.words))
        if lead == len(event.words) or event.words[lead].text in DECLARES:
            return self._assignment(event)
        return self._command(event, event.words[lead:])

    def _arithmetic(self, event: Event) -> list[str]:
        names = dict.fromkeys(re.findall(NAME, event.text.removeprefix("let ")))
        code = self.unknown.find(event, [Use(name, 0, 0, False) for name in names])
        assigned = [name for found in _CHANGED.findall(event.text) for name in found if name]
        self.unknown.sets(event, assigned)
        if not event.unknown:
            return [*code, GO]
        self.unknown.taken(event, event.unknown, lossy=True)
        return [*code, *(marked(name, event.unknown) for name in assigned), SKIP]

    def _condition(self, event: Event) -> list[str]:
        self.unknown.sets(event, re.findall(rf"^(?:for|select) ({NAME})", event.text))
        compared = _COMPARED.findall(event.text) if event.text.startswith("[[") else []
        numbers = [Use(name, 0, 0, False, True) for pair in compared for name in pair if name]
        code = self.unknown.find(event, [*uses(event.text), *numbers])
        if mark := event.unknown or event.read or self.files.tested(event):
            self.unknown.taken(event, mark, lossy=True, test=True)
        return [*code, GO]

    def _assignment(self, event: Event) -> list[str]:
        declares = event.words[0].text in DECLARES
        integers = declares and any(re.fullmatch(r"-\w*i\w*", one.text) for one in event.words[1:])
        assigned = [(one, *assignment(one.text)) for one in event.words if ASSIGNS.match(one.text)]
        used = [*uses(event.text)]
        for word, _, _, start in assigned if integers else ():
            used += [Use(name, word.start, word.end, False) for name in re.findall(NAME, word.text[start:])]
        code = self.unknown.find(event, used)
        for word, name, appends, start in assigned:
            items = elements(word.text)
            why = self.unknown.note_empty(event, [word.text[start:]] if items is None else items)
            if not appends:
                self.unknown.empty.pop(name, None)
            if why and items is None:
                self.unknown.empty[name] = why
        names = [name for _, name, *_ in assigned]
        self.unknown.sets(event, names)
        if event.unknown:
            self.unknown.flag(event.pid, event.unknown, lossy="|" in event.text)
            tainted = event.tainted.keys()
            self._may_set_any(
                event, event.unknown, lambda text: any(one.name in tainted for one in uses(text))
            )
        made = [name for word, name, *_ in assigned if has_command(word.text)]
        if any(self.unknown.is_integer(name) for name in made):  # for bash a mark is no number
            mark = event.unknown or self._mark(f"line {event.line} computes it of a command's output")
            return [*code, *(marked(name, mark) for name in names), SKIP]
        if not event.spans:
            return [*code, GO]
        changed = replaced(event.text, event.spans)
        if integers or has_command(changed):  # its commands would not be seen
            return [*code, *(marked(name, event.unknown) for name in names), SKIP]
        return [*code, changed, SKIP]

    def _command(self, event: Event, given: list[Word]) -> list[str]:
        code = self.unknown.find(event, [*uses(event.text)])
        name = given[0].text
        if not _PLAIN.fullmatch(name):
            name = "" if has_command(name) else self.unknown.value(name)
        if event.unknown:
            self.unknown.flag(event.pid, event.unknown, lossy=True)
        kind = "" if name in self._stubs or MARK.search(name) else self.unknown.kind(name)
        name = given[0].text if kind == "keyword" else name  # it is quoted, and therefore a program's
        if name == "command" or kind == "builtin":
            if name in ("[", "test"):
                return self._condition(event)
            return [*code, *self.builtins.answer(event, name, [one.text for one in given[1:]])]
        if kind == "function":
            return [*code, *self._call(event)] if event.spans else [*code, GO]
        if kind == "file" and name in READERS and not _DIFFERS.match(event.text):
            self.unknown.status[event.pid] = event.status  # of a pipeline, with `pipefail`
            mark = event.unknown or self.files.made(event, _files(event.text))
            return [*code, *self.unknown.prints(event, mark)] if mark else [*code, GO]
        return [*code, *self._stub(event, name, given)]

    def _call(self, event: Event) -> list[str]:
        """A call of a function with arguments that are computed from what is not known."""
        names = [one for one in event.lost if re.fullmatch(NAME, one)]
        if len(names) < len(event.lost):
            self.unknown.lose(f"line {event.line} calls a function with arguments that are not known")
            return [SKIP]
        self.unknown.running.append(event)
        self._entering[event.text] = event.unknown, [marked(name, event.tainted[name]) for name in names]
        return [*(f"{name}=1" for name in names), GO]

    def _stub(self, event: Event, name: str, given: list[Word]) -> list[str]:
        """A program that does not run here."""
        output = f"it is the output of {os.path.basename(name) or 'a program'} (line {event.line})"
        mark = event.unknown or self._mark(output)
        self.unknown.taken(event, mark)
        self.unknown.note_empty(event, [one.text for one in given[1:]])
        known = [one.text for one in given if not (has_command(one.text) or GLOB.search(one.text))]
        self._started.append((event, self.unknown.expanded(known) if len(known) < len(given) else None))
        started = f"__program '{mark}' {len(self._started) - 1}"
        if event.spans or not _PLAIN.fullmatch(name) or any(_COMPUTED.search(one.text) for one in given):
            hidden = self._mark(f"a program's output is in line {event.line}")
            spans = [*event.spans]
            for one in given[1:]:
                if has_command(one.text):
                    if re.search(r"\s", one.text) and PYTHON.search(one.text):
                        self.unknown.branches.append(f"{self._mark.why(hidden)}, and a shell runs it")
                    key = _KEYED.match(one.text)
                    spans.append((one.start + (key.end() if key else 0), one.end, hidden))
            return [f"__free 0; {started} {replaced(event.text, spans)[given[0].start :]}; __lock", SKIP]
        self._stubs.add(name)
        again = self.unknown.seen(event)
        return [f'{name} () {{ {started} {name} "$@"; builtin return {int(again > 3)}; }}', GO]


def _text(folder: str, name: str) -> str:
    return file.read_text(errors="replace") if (file := Path(folder, name)).is_file() else ""


def _files(text: str) -> Iterator[Word]:
    """The words of a pipeline that may be files which it reads."""
    name = ""
    for one in words_of(text):
        if name in CONTENTS:
            yield one
        name = "" if re.search(r"[|&;]$", one.text) else name or one.text
    yield from words_of(text, "<")
