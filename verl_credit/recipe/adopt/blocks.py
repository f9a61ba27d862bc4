"""What a script may do where it does not surely run: the lines that a condition decides about, and what they assign.

bash itself prints the script (`declare -f`): one command in a line, bodies indented. Nothing is decided here.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from verl_credit.recipe.adopt.words import NAME, end_of, one_line

_ASSIGNED = re.compile(
    rf"(?:^|[\s;(&|])(?:for |select )?({NAME})(?:\[[^\]]*\])?(?:\+?=|(?<=\w) in\b)"
    rf"|\(\((?:.*?[\s,(])?({NAME})\s*(?:[-+*/%&|^]|<<|>>)?=(?!=)|({NAME})(?:\+\+|--)|(?:\+\+|--)({NAME})|\$\{{({NAME}):?="
)
_NAMES_ALL = re.compile(
    r"(?:^|[\s;(&|])(?:read|mapfile|readarray|unset|getopts|printf -v|let|declare|local|export)\s(.*)"
)
_SOURCES = re.compile(r"(?:^|[\s;(&|])((?:source|\.|eval)\s[^;&|]*)")
_SHIFTS = re.compile(r"(?:^|[\s;(&|])(shift\b[^;&|]*|set (?:--|[^-+])[^;&|]*)")
_EXITS = re.compile(r"(?:^|[\s;(&|{])(exit\b[^;&|}]*)")
_KEY = re.compile(rf"[+~]*({NAME}(?:\.\w[\w-]*)+)=")
_LAUNCH = re.compile(r"main_\w*ppo|main_dapo|fully_async_main")
_FUNCTION = re.compile(r"\s*function (\S+) \(\)\s*")
_LOOP = re.compile(r"\s*(?:for|while|until|select)\b")
_BACKGROUND = re.compile(r" & (?=(?:if|while|until|for|select|case)\b|[{(] ?$)")
"""bash lists what follows a command in the background in the same line."""
_HEREDOC = re.compile(r"<<(-?)\s*['\"\\]?(\w+)")
_ENDS = re.compile(r"(?:fi|done|esac|\}|\))")


@dataclass
class Decided:
    """What lies behind a condition: assigned names, overrides of the launch, number of launches."""

    names: set[str] = field(default_factory=set)
    keys: set[str] = field(default_factory=set)
    launches: int = 0
    sources: set[str] = field(default_factory=set)
    """Commands that may assign any name: a file is sourced, a text evaluated."""
    shifts: set[str] = field(default_factory=set)
    """Commands that set the arguments of the script."""
    ends: set[str] = field(default_factory=set)
    """Commands that end it."""

    def add(self, other: Decided) -> None:
        self.names |= other.names
        self.keys |= other.keys
        self.launches += other.launches
        self.ends |= other.ends
        self.sources |= other.sources
        self.shifts |= other.shifts


class Blocks:
    def __init__(self) -> None:
        self.lines: list[str] = []
        self.functions: dict[str, tuple[int, int]] = {}
        self.assigned: set[str] = set()

    def add(self, listing: str) -> None:
        first = len(self.lines)
        for line in _logical(listing):
            indent, (*background, rest) = " " * _indent(line), _BACKGROUND.split(line.strip())
            self.lines += [f"{indent}{one} &" for one in background] + [indent + rest]
        for n in range(first, len(self.lines)):
            if (match := _FUNCTION.fullmatch(self.lines[n])) and n + 1 < len(self.lines):
                self.functions[match[1]] = (n, self._end(n + 1))
        self.assigned |= self._of(range(first, len(self.lines)), {*self.functions}).names

    def decided(self, command: str) -> Decided | None:
        """What is decided by the status of the command, or by a name of a function; None where nothing is."""
        wanted = re.compile(rf"(?<![\w./-]){re.escape(one_line(command))}(?![\w./-])")
        decide = (n for n, line in enumerate(self.lines) if self._decides(line, wanted))
        regions = [range(n, self._end(n) + 1) for n in decide]
        regions += [
            range(last, self._end(last) + 1)
            for n, line in enumerate(self.lines)
            if wanted.search(one_line(line))
            for last in self._closing(n)
        ]
        if not regions:
            return None
        found = [self._widened(region) for region in regions]
        return self._of([n for region in found for n in region], set())

    def sets(self, command: str) -> set[str]:
        """The names that the command may set, and the functions that it calls."""
        self.lines.append(command)
        return self._of([len(self.lines) - 1], set()).names

    def before(self, command: str) -> str:
        """What stands before the command in its pipelines."""
        wanted = re.compile(rf"(.*)\|&? {re.escape(one_line(command))}(?![\w./-])")
        return " ".join(match[1] for line in self.lines if (match := wanted.search(one_line(line))))

    def knows(self, command: str) -> bool:
        return any(one_line(command) in one_line(line) for line in self.lines)

    def _decides(self, line: str, wanted: re.Pattern[str]) -> bool:
        text = one_line(line)
        match = wanted.search(text)
        if match is None:
            return False
        opens = re.match(r"(?:if|while|until|for|select|case)\b", text)
        return bool(opens or re.search(r"&&|\|\|", text[match.end() :]))

    def _end(self, start: int) -> int:
        """The last line of the command that starts in this line."""
        depth, n = _indent(self.lines[start]), start
        while n + 1 < len(self.lines):
            text, indent = self.lines[n + 1].strip(), _indent(self.lines[n + 1])
            if indent > depth or (
                indent == depth
                and text.startswith(("else", "do", "then", "{"))
                and not text.startswith(("done", "double"))
            ):
                n += 1
            else:
                return n + 1 if indent == depth and n > start and _ENDS.match(text) else n
        return n

    def _closing(self, inner: int) -> list[int]:
        """The lines behind this one in which a group closes whose status decides: `} && n=2`."""
        return [
            n
            for n in range(inner, len(self.lines))
            if re.match(r"(?:fi|done|esac|\}|\)).*?(?:&&|\|\|)", self.lines[n].strip())
            and _indent(self.lines[n]) < _indent(self.lines[inner])
            and all(_indent(self.lines[k]) > _indent(self.lines[n]) for k in range(inner, n))
        ]

    def _widened(self, region: range) -> range:
        """A region that leaves its loop or its function decides about the rest of these, too."""
        text = "\n".join(self.lines[n] for n in region)
        around = []
        if re.search(r"\b(?:break|continue)\b", text):
            loops = (n for n in range(region[0], -1, -1) if _LOOP.match(self.lines[n]))
            around += [n for n in loops if region[0] in range(n, self._end(n) + 1)]
        if re.search(r"\breturn\b", text):
            around += [start for start, end in self.functions.values() if start < region[0] <= end]
        starts = [region[0], *around]
        return range(min(starts), max(self._end(n) if n != region[0] else region[-1] for n in starts) + 1)

    def _of(self, places, seen: set[str]) -> Decided:
        found = Decided()
        for n in places:
            line = self.lines[n]
            for match in _ASSIGNED.finditer(line):
                found.names |= {name for name in match.groups() if name}
            for match in _NAMES_ALL.finditer(line):
                found.names |= set(re.findall(NAME, match[1]))
            launches = len(_LAUNCH.findall(line))
            found.launches += launches
            found.keys |= set() if launches else set(_KEY.findall(line))
            found.ends |= {one_line(text) for text in _EXITS.findall(line)}
            found.sources |= {one_line(text) for text in _SOURCES.findall(line)}
            found.shifts |= {one_line(text) for text in _SHIFTS.findall(line)}
            for function in set(re.findall(r"[^\s;(){}&|$\"']+", line)) & self.functions.keys() - seen:
                seen = seen | {function}
                start, end = self.functions[function]
                found.add(self._of(range(start + 1, end + 1), seen))
        return found


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip(" "))


def _logical(listing: str) -> list[str]:
    """The lines of a listing; a line with a quoted line break stays one, and the text of a heredoc is left out."""
    lines, start, at = [], 0, 0
    while at < len(listing):
        if listing[at] == "\n":
            lines.append(listing[start:at])
            heredoc = None if re.search(r"\(\(|<<<", lines[-1]) else _HEREDOC.search(lines[-1])
            at = start = at + 1
            if heredoc:
                tabs = "\t*" if heredoc[1] else ""
                end = re.compile(rf"^{tabs}{re.escape(heredoc[2])}$\n?", re.MULTILINE)
                at = start = match.end() if (match := end.search(listing, at)) else len(listing)
        elif listing[at] in "'\"`\\" or listing.startswith(("$(", "${", "$'", "$["), at):
            at = end_of(listing, at)
        else:
            at += 1
    lines.append(listing[start:])
    return [line for line in lines if line.strip()]
