"""Which variables of a script are not known, and why. A variable becomes a mark at the latest where a command reads it."""

from __future__ import annotations

import re
import shlex
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property

from verl_credit.recipe.adopt.blocks import Blocks
from verl_credit.recipe.adopt.marks import MARK, Marks, Reason, mark_in
from verl_credit.recipe.adopt.words import DECLARES, NAME, Use, Word, has_command, splits, uses, words

GO, SKIP = "__free 0", "__free 1"
CHANGES = ("RANDOM", "SRANDOM", "SECONDS", "EPOCHSECONDS", "EPOCHREALTIME")
GLOB = re.compile("[*?]")
SPECIAL = "?$!-#@*0"
_SHELL_KIND = re.compile(r"^case |\*i\*")
"""A test of `$-`: is the shell an interactive one?"""
_OWN = {
    "HOME", "PATH", "PWD", "OLDPWD", "USER", "SHELL", "IFS", "LINENO", "BASH", "BASH_VERSION", "BASH_SOURCE", "FUNCNAME",
}  # fmt: skip
"""Names that are bash's or the user's: a file that is not here is taken to leave them alone."""


@dataclass
class Event:
    """A simple command that bash is about to run."""

    pid: str
    line: int
    functions: list[str]
    folder: str
    text: str
    status: str = ""
    """A mark where the status of the command before it is not known."""
    read: str = ""
    """A mark where the file is not known that a compound command before it reads."""
    mark: str = ""
    """A mark where the output of a command in it is not known."""
    lossy: bool = False
    """May the mark be missing in the output?"""
    before: Event | None = None
    """The command of its shell before it."""
    settled: bool = False
    """Is what it has done taken in? In the background it may still run."""
    tainted: dict[str, str] = field(default_factory=dict)
    """The names that it reads and that are not known, with their marks."""
    lost: dict[str, str] = field(default_factory=dict)
    """The ones whose mark would be lost."""
    spans: list[tuple[int, int, str]] = field(default_factory=list)
    """Where it would lose a mark, and the mark."""
    declared: dict[str, str] = field(default_factory=dict)
    """What bash declares for each name that it reads."""

    @cached_property
    def words(self) -> list[Word]:
        return words(self.text)

    @cached_property
    def splits(self) -> bool:
        """May one of its arguments be several?"""
        name, *rest = [one.text for one in self.words] or [""]
        return name not in DECLARES and any(map(splits, rest))

    @property
    def unknown(self) -> str:
        """The mark of the first name that is not known; "" where all are."""
        return next(iter(self.tainted.values()), "")

    @property
    def hides(self) -> bool:
        """May what is not known stand in it without a mark?"""
        return bool(self.mark) and (self.lossy or "|" in self.text)

    @property
    def is_condition(self) -> bool:
        return re.match(r"\[\[? |test |case |for |select ", self.text) is not None

    @property
    def in_function(self) -> bool:
        return not {*self.functions} <= {"source"}


class Unknown:
    """``ask``: runs code in the shell that waits, and returns its fields; their number, or -1 for all up to an end."""

    def __init__(self, ask: Callable[[str, int], list[str]]) -> None:
        self.ask = ask
        self.blocks = Blocks()
        self.mark = Marks()
        self.shells: set[str] = set()
        self.last: dict[str, Event] = {}
        """The last command of each shell."""
        self.running: list[Event] = []
        """Commands that have others inside. In a pipeline or in the background one still runs after the next has started."""
        self.status: dict[str, str] = {}
        """A mark where the status of a shell's last command is not known."""
        self.keys: dict[str, str] = {}
        """Overrides of a launch that a line sets which does not surely run, and why."""
        self.unsure: set[str] = set()
        """Commands that do not surely run, and would change any variable, the script's arguments, or end the script."""
        self.branches: list[str] = []
        """Conditions that are not known and decide between several launches."""
        self.hollow: dict[str, str] = {}
        """Words that are empty in part because a variable is not set, and why."""
        self.empty: dict[str, str] = {}
        """Variables that are empty for this reason."""
        self.several: set[str] = set()
        """Marks that stand for any number of words."""
        self._pinned = {name: self.mark(f"{name} differs each time") for name in CHANGES}
        self._positional = ""
        self._doubt = ""
        self._since: set[str] = set()
        self._seen: Counter[tuple[str, int]] = Counter()

    def seen(self, event: Event) -> int:
        """How often the command was seen, this time included."""
        self._seen[event.text, event.line] += 1
        return self._seen[event.text, event.line]

    def lose(self, why: str) -> None:
        """From here on every variable is doubtful until the script sets it."""
        self._doubt, self._since = self.mark(why), set()

    def sets(self, event: Event, names: Iterable[str]) -> None:
        """The command sets the names. In a function or a subshell they may be its own, and the script's stay doubtful."""
        if event.pid in self.shells and not event.in_function:
            self._since |= {*names}

    def pin(self, names: Iterable[str], mark: str) -> None:
        """The names are not known, whatever sets them: a loop or a function may run the lines again."""
        for name in {*names} - {"IFS", "PATH"}:
            self._pinned.setdefault(name, mark)

    def decide(self, event: Event, mark: str, *, test: bool = False, fails: bool = True) -> None:
        """What the command decides is not known any more. ``test``: it is there to decide; ``fails``: it may fail."""
        self.status[event.pid] = mark
        if test and not self.blocks.knows(event.text):
            self.lose(f"line {event.line} decides by what is not known: {self.mark.why(mark)}")
        for one in filter(None, map(self.blocks.decided, [event.text, *event.functions])):
            why = f"line {event.line} sets it only under a condition that is not known: {self.mark.why(mark)}"
            own = self.mark(why)
            self.pin(one.names, own)
            for key in one.keys:
                self.keys.setdefault(key, why)
            self.unsure |= one.sources | one.shifts | one.ends
            if one.sources:
                self.lose(why)
            if one.shifts:
                self._positional = own
            if one.launches > 1 and fails:
                self.branches.append(f"line {event.line}: {self.mark.why(mark)}")

    def flag(self, pid: str, mark: str, lossy: bool = False) -> None:
        """Commands of other shells may have the output of this one in them."""
        for event in self.running:
            if event.pid != pid:
                event.mark, event.lossy = event.mark or mark, event.lossy or lossy
                self.several |= {event.mark} if event.splits else set()

    def taken(self, event: Event, mark: str, *, lossy: bool = False, test: bool = False) -> None:
        """Neither the status nor the output of the command is known."""
        self.flag(event.pid, mark, lossy)
        self.decide(event, mark, test=test)

    def prints(self, event: Event, mark: str) -> list[str]:
        """The command does not run, and its output is the mark."""
        self.taken(event, mark)
        return [f"builtin printf '%s\\n' '{mark}'", SKIP]

    def find(self, event: Event, used: list[Use]) -> list[str]:
        """Notes which names are not known. Returns code that makes the marks their values."""
        if found := MARK.search(event.text):  # the text of `bash -c`
            used.append(Use(found[0], 0, 0, True))
        for one in [one for one in used if one.name[0] == "!" and len(one.name) > 1]:
            used.append(one._replace(name=self.value(f'"${{{one.name[1:]}}}"') or "#"))
        event.declared = self._states(one.name for one in used)
        code: dict[str, None] = {}
        counted = self._counted(one.name for one in used)
        for one in used:
            whole = self._mark_of(event, one.name) or counted.get(one.name, "")
            if mark := whole or mark_in(event.declared.get(one.name, "")):
                event.tainted[one.name] = mark
                if one.loses or one.name in counted:
                    event.lost[one.name] = mark
                    event.spans.append((one.start, one.end, mark))
                if whole and re.fullmatch(NAME, one.name):
                    code[f"__mark {one.name} '{mark}'"] = None
        if event.splits:
            self.several |= {*event.tainted.values()}
        return [*code]

    def _counted(self, names: Iterable[str]) -> dict[str, str]:
        """The number of arguments and those behind one of which nobody knows how many words it is, with its mark."""
        asked = {one for one in names if one == "#" or one.isdigit()} if self.several else set()
        given = self.expanded(['"$@"']) if asked else []
        found = ((n, mark_in(one)) for n, one in enumerate(given, 1))
        first, mark = next(((n, mark) for n, mark in found if mark in self.several), (0, ""))
        return {one: mark for one in asked if first and (one == "#" or int(one) > first)}

    def _mark_of(self, event: Event, name: str) -> str:
        """The mark of a name of whose value nothing is known."""
        if MARK.search(name):
            return name
        if name == "?":
            return event.status
        if name == "PIPESTATUS":
            return self.mark("it is the status of programs that do not run here")
        if name in ("$", "!", "PPID", "BASHPID"):
            return self.mark(f"${name} is a process's number")
        if name in ("_", "BASH_ENV") or (
            name == "-" and not (event.is_condition and _SHELL_KIND.search(event.text))
        ):
            return self.mark(f"${name} is another one where the script runs")
        if (name in ("@", "*", "#") or name.isdigit()) and not event.in_function and self._positional:
            return self._positional
        if name in self._pinned:
            return self._pinned[name]
        doubtful = re.fullmatch(NAME, name) and not name.startswith("__") and name not in self._since | _OWN
        return self._doubt if doubtful else ""

    def _states(self, names: Iterable[str]) -> dict[str, str]:
        """What bash declares for each name; "" for one that is not set."""
        listed = [*dict.fromkeys(one for one in names if one[0] not in "?$!-#" and not MARK.search(one))]
        code = []
        for name in listed:
            if name.isdigit():
                code.append(f'builtin printf "%s\\0" "${{{name}+={name} ${{{name}}}}}"')
            elif name in "@*":
                code.append('builtin printf "%s\\0" "=$*"')
            else:
                code.append(f"builtin declare -p {name} 2>/dev/null; builtin printf '\\0'")
        fields = self.ask("{ " + "; ".join(code) + "; } >&201", len(listed)) if listed else []
        kept = (one if "=" in one or one.startswith(("declare -a", "declare -A")) else "" for one in fields)
        return dict(zip(listed, kept, strict=True))

    def is_integer(self, name: str) -> bool:
        return re.match(r"declare -\w*i", self._states([name])[name]) is not None

    def expanded(self, raw: Iterable[str]) -> list[str]:
        """The words that bash makes of each text."""
        code = "; ".join(f"builtin printf '%s\\0' {one}" for one in raw)
        return self.ask(f"{{ {code}; builtin printf '\\4\\0'; }} >&201 2>/dev/null", -1) if code else []

    def value(self, raw: str) -> str:
        """The first word that bash makes of the text; "" where there is none."""
        return next(iter(self.expanded([raw])), "")

    def kind(self, name: str) -> str:
        """What bash takes the name of a command for: a builtin, a function, a file; "" where it finds none."""
        code = f"builtin type -t -- {shlex.quote(name)}; builtin printf '\\0'"
        return self.ask(f"{{ {code}; }} >&201", 1)[0].strip()

    def run(self, code: list[str]) -> None:
        if code:
            self.ask("; ".join([*code, "builtin printf '\\4\\0' >&201"]), -1)

    def note_empty(self, event: Event, items: Iterable[str]) -> str:
        """Remembers which words are empty in part because a variable is not set, and returns why, "" where none is."""
        found = ""
        for item in items:
            why = next(filter(None, (self._why_empty(event, one) for one in uses(item))), "")
            if why and not has_command(item):
                self.hollow |= dict.fromkeys(self.expanded([item]), why)
            found = found or why
        return found

    def _why_empty(self, event: Event, use: Use) -> str:
        name = use.name
        if use.default or name in event.tainted or name[0] in SPECIAL:
            return ""
        return self.empty.get(name) or ("" if event.declared.get(name) else self._absent(event, name))

    def _absent(self, event: Event, name: str) -> str:
        if name.isdigit():
            of = event.functions[0] if event.in_function else "the script"
            return f"argument {name} of {of} is not given (line {event.line})"
        if name in self.blocks.assigned:
            return f"{name} is not set in line {event.line}; the script sets it where this run did not come"
        text = f"{name} (line {event.line}) is set neither in the script nor in the environment"
        return Reason(text, variable=name)


def marked(name: str, mark: str, unless_marked: bool = False) -> str:
    """Code that makes the mark the value of the variable."""
    code = f"__mark {name} '{mark}'"
    return f"[[ ${{{name}[*]}} == *$'\\002'* ]] || {code}" if unless_marked else code
