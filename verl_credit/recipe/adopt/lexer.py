"""Takes a shell script apart into commands and words, without running any of it."""

from __future__ import annotations

import re
from typing import NamedTuple

NAME = r"[A-Za-z_]\w*"
NAMED = re.compile(rf"{NAME}|[\d@*#]")
BLANK, ENDS = " \t", "\n;&|"
CLOSES = {"(": ")", "{": "}"}


class Part(NamedTuple):
    text: str
    quote: str
    """"'", '"', or "" where the shell would split what it expands."""


class Word(NamedTuple):
    parts: tuple[Part, ...]
    items: tuple[Word, ...] | None = None
    """The words of an array, ``NAME=(a b)``."""

    @property
    def plain(self) -> str:
        """The text of a word without quotes (a keyword, a name)."""
        return self.parts[0].text if len(self.parts) == 1 and not self.parts[0].quote else ""


def commands(text: str) -> list[list[Word]]:
    """The script's commands in order; those of an `if` or a loop stand among them with their keywords."""
    return _Lexer(text.replace("\\\r\n", "").replace("\\\n", "")).commands()


class _Lexer:
    def __init__(self, text: str) -> None:
        self.text, self.at = text, 0

    def commands(self) -> list[list[Word]]:
        found: list[list[Word]] = [[]]
        while self.at < len(self.text):
            char = self.text[self.at]
            if char in BLANK + "\r":
                self.at += 1
            elif char in ENDS or char in "()":
                self.at += 1
                if char == "&" and self._previous() in "><":
                    continue
                found.append([])
            elif char == "#":
                self.at = self._find("\n")
            else:
                found[-1].append(self._word())
        return [command for command in found if command]

    def _previous(self) -> str:
        return self.text[self.at - 2] if self.at > 1 else " "

    def _find(self, end: str) -> int:
        place = self.text.find(end, self.at)
        return len(self.text) if place < 0 else place

    def _word(self) -> Word:
        parts: list[Part] = []
        bare = ""

        def add(text: str, quote: str) -> None:
            nonlocal bare
            if bare:
                parts.append(Part(bare, ""))
                bare = ""
            parts.append(Part(text, quote))

        while self.at < len(self.text):
            char = self.text[self.at]
            if char in BLANK + ENDS + "\r)":
                break
            if char == "(":
                if bare.endswith("=") and not parts:
                    return Word((Part(bare, ""),), self._array())
                break
            if char == "'":
                end = self.text.find("'", self.at + 1)
                end = len(self.text) if end < 0 else end
                add(self.text[self.at + 1 : end], "'")
                self.at = end + 1
            elif char == '"':
                add(self._double(), '"')
            elif char == "\\":
                add(self.text[self.at + 1 : self.at + 2], "'")
                self.at += 2
            elif char in "$`":
                bare += self._expansion()
            else:
                bare += char
                self.at += 1
        if bare:
            parts.append(Part(bare, ""))
        return Word(tuple(parts))

    def _array(self) -> tuple[Word, ...]:
        self.at += 1
        items: list[Word] = []
        while self.at < len(self.text) and self.text[self.at] != ")":
            if self.text[self.at] in BLANK + "\r\n":
                self.at += 1
            elif self.text[self.at] == "#":
                self.at = self._find("\n")
            else:
                before = self.at
                items.append(self._word())
                self.at += self.at == before  # a sign that begins no word
        self.at += 1
        return tuple(items)

    def _double(self) -> str:
        """The text between double quotes; ``\\"`` is a quote, and expansions keep their own quotes."""
        self.at += 1
        found = ""
        while self.at < len(self.text) and self.text[self.at] != '"':
            if self.text[self.at] == "\\" and self.text[self.at + 1 : self.at + 2] in ('"', "\\", "$", "`"):
                found += self.text[self.at + 1 : self.at + 2].replace("$", "\\$")
                self.at += 2
            elif self.text[self.at] in "$`":
                found += self._expansion()
            else:
                found += self.text[self.at]
                self.at += 1
        self.at += 1
        return found

    def _expansion(self) -> str:
        start, self.at = self.at, expansion_end(self.text, self.at)
        return self.text[start : self.at]


def expansion_end(text: str, start: int) -> int:
    """The place after the ``$name``, ``${...}``, ``$(...)``, ``$((...))`` or backticks that begin at ``start``."""
    if text[start] == "`":
        end = text.find("`", start + 1)
        return len(text) if end < 0 else end + 1
    opening = text[start + 1 : start + 2]
    if opening not in CLOSES:
        name = NAMED.match(text, start + 1)
        return name.end() if name else start + 1
    depth = 0
    for at in range(start + 1, len(text)):
        depth += (text[at] == opening) - (text[at] == CLOSES[opening])
        if not depth:
            return at + 1
    return len(text)
