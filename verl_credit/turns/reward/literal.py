"""Lists and mappings that stand in text as JSON, Python or numpy writes them, read without evaluating anything."""

from __future__ import annotations

import ast
import json
import re
import warnings

DEEPEST = 5
LONGEST_NUMBER = 200  # digits; Python refuses to parse much longer numbers

_TOKEN = re.compile(
    r"""(?P<text>"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')"""
    r"|(?P<number>[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)(?!\w)"
    r"|(?P<word>[A-Za-z_]\w*)"
    r"|(?P<mark>[][(){},:=])"
    r"|(?P<space>\s+)",
    re.DOTALL | re.ASCII,
)
_WORDS = {
    "null": None,
    "None": None,
    "nan": None,
    "NaN": None,
    "True": True,
    "true": True,
    "False": False,
    "false": False,
}
_CLOSING = {"[": "]", "(": ")", "{": "}"}


class NotALiteral(ValueError):
    """The text is no list and no mapping; the message has the reason."""


def literal(text: str) -> tuple[list | dict, int]:
    """(the list or mapping, how many quoted texts are in it). Raises NotALiteral.

    Members of a list are separated by commas, or all of them by blanks as numpy does. Round and curly brackets are a list
    where they hold two quoted texts or more and nothing else.
    """
    reader = _Reader(text)
    value = reader.value(0)
    if reader.left() or not isinstance(value, list | dict):
        raise NotALiteral("something stands behind it")
    return value, reader.quoted


class _Reader:
    def __init__(self, text: str):
        self.tokens, self.place, self.quoted = [], 0, 0
        at, after_blank = 0, True
        while at < len(text):
            found = _TOKEN.match(text, at)
            if found is None:
                raise NotALiteral(f"unexpected {text[at]!r}")
            if found.lastgroup != "space":
                self.tokens.append((found.lastgroup, found[0], after_blank))
            at, after_blank = found.end(), found.lastgroup == "space"

    def left(self) -> bool:
        return self.place < len(self.tokens)

    def next(self, *expected: str) -> tuple[str, str, bool]:
        if not self.left():
            raise NotALiteral("it is cut off")
        token = self.tokens[self.place]
        if expected and token[1] not in expected:
            raise NotALiteral(f"{token[1][:20]!r} where {' or '.join(expected)} belongs")
        self.place += 1
        return token

    def peek(self) -> str:
        return self.tokens[self.place][1] if self.left() else ""

    def value(self, depth: int):
        if depth > DEEPEST:
            raise NotALiteral(f"nested more than {DEEPEST} deep")
        kind, token, _ = self.next()
        if kind == "text":
            self.quoted += 1
            return _text(token)
        if kind == "number":
            if len(token) > LONGEST_NUMBER:
                raise NotALiteral("a number of that length")
            return float(token) if set(token) & set(".eE") else int(token)
        if token in _WORDS:
            return _WORDS[token]
        if token == "array":
            return self.array(depth)
        if token == "{" and self.is_mapping():
            return self.mapping(depth)
        if token in _CLOSING:
            return self.members(token, depth)
        raise NotALiteral(f"{token[:20]!r} without quotes")

    def array(self, depth: int) -> list:
        self.next("(")
        self.next("[")
        members = self.members("[", depth)
        if self.peek() == ",":
            for expected in (",", "dtype", "="):
                self.next(expected)
            self.next()
        self.next(")")
        return members

    def is_mapping(self) -> bool:
        after = self.tokens[self.place : self.place + 2]
        return bool(after) and (after[0][1] == "}" or (len(after) == 2 and after[1][1] == ":"))

    def mapping(self, depth: int) -> dict:
        entries: dict = {}
        while self.peek() != "}":
            kind, token, _ = self.next()
            if kind != "text" or (key := _text(token)) in entries:
                raise NotALiteral(f"{token[:20]!r} as a key")
            self.next(":")
            entries[key] = self.value(depth + 1)
            if self.peek() != "}":
                self.next(",")
        self.next("}")
        return entries

    def members(self, opening: str, depth: int) -> list:
        closing, members, commas, blanks, quoted = _CLOSING[opening], [], 0, 0, self.quoted
        while self.peek() != closing:
            if members and self.left() and self.tokens[self.place - 1][1] != ",":
                if not self.tokens[self.place][2]:
                    raise NotALiteral("two texts without a comma or a blank between them")
                blanks += 1
            members.append(self.value(depth + 1))
            if self.peek() == ",":
                self.next()
                commas += 1
        self.next(closing)
        if commas and blanks:
            raise NotALiteral("a comma is missing")
        if opening != "[" and not (commas and self.quoted - quoted == len(members) > 1):
            raise NotALiteral(f"no list in {opening}{closing}")
        return members


def _text(token: str) -> str:
    if "\\" not in token:
        return token[1:-1]
    try:
        if token[0] == '"':
            try:
                return _without_control(json.loads(token, strict=False))
            except ValueError:
                pass
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Python warns of an escape that it does not know
            return _without_control(ast.literal_eval(token.replace("\n", "\\n")))
    except (ValueError, SyntaxError, MemoryError, RecursionError) as error:
        raise NotALiteral(f"{token[:40]!r}: {error}") from None


def _without_control(text: str) -> str:
    r"""LaTeX whose backslashes were not doubled: "\frac" would become a form feed and "rac"."""
    if any(ord(character) < 32 or "\ud800" <= character < "\ue000" for character in text.rstrip("\n")):
        raise NotALiteral("an escape that gives a control character or half of a character")
    return text
