"""Takes one simple command of bash apart: its words, and the variables that its expansions read. Nothing is expanded."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

NAME = r"[A-Za-z_]\w*"
DECLARES = ("declare", "typeset", "export", "local", "readonly")
READS = ("read", "mapfile", "readarray")
ASSIGNS = re.compile(rf"({NAME})(?:\[[^\]]*\])?(\+?)=", re.DOTALL)
REDIRECTS = re.compile(r"(?:\d+|\{\w+\})?(?:<<<|<<-?|<>|>>|>\||>&|<&|>(?!\()|<(?!\())|&>>?")
UNSTABLE = ("?", "$", "!", "-", "_", "PIPESTATUS", "BASHPID", "PPID", "BASH_ENV")
"""Variables of bash that a script cannot set."""
_BRACED = re.compile(rf"\$\{{([#!]?)({NAME}|\d+|[@*#?$!-])(\[.*?\])?(:?[-=?+])?(.*)\}}", re.DOTALL)
_BARE = re.compile(rf"\$({NAME}|\d|[@*#?$!-])")


class Use(NamedTuple):
    """An expansion that reads a variable, at ``text[start:end]``."""

    name: str
    start: int
    end: int
    plain: bool
    """The value stands in the result as it is; otherwise the result is made of it: its length, a part, a number."""
    default: bool = False
    """The expansion says what stands there where the variable is not set."""
    indexed: bool = False
    """One element of an array, which has an unknown number of them where one is not known."""

    @property
    def loses(self) -> bool:
        """May the expansion of a value with a mark have no mark?"""
        return not self.plain or self.indexed


class Word(NamedTuple):
    text: str
    start: int
    end: int


def end_of(text: str, at: int, quoted: bool = False) -> int:
    """The place after the quote, expansion, escape or parenthesis that starts at ``at``; else the next place."""
    char, two = text[at], text[at : at + 2]
    if char == "\\":
        return min(at + 2, len(text))
    if two == "$'" and not quoted:
        return _closed(text, at + 2, "'", lambda place: place + 1 + (text[place] == "\\"))
    if char == "'" and not quoted:
        return _closed(text, at + 1, "'", lambda place: place + 1)
    if char == '"':
        return _closed(
            text, at + 1, '"', lambda place: end_of(text, place, True) if text[place] != '"' else place + 1
        )
    if char == "`":
        return _closed(text, at + 1, "`", lambda place: place + 1 + (text[place] == "\\"))
    if two == "${":
        return _closed(text, at + 2, "}", lambda place: end_of(text, place, quoted))
    if two in ("$(", "$[") or ((two in ("<(", ">(") or char == "(") and not quoted):
        start = at + 1 if char == "(" else at + 2
        return _closed(text, start, "]" if two == "$[" else ")", lambda place: end_of(text, place))
    return at + 1


def _closed(text, at, close, after) -> int:
    while at < len(text):
        if text[at] == close:
            return at + 1
        at = after(at)
    return len(text)


def splits(word: str) -> bool:
    """May bash make several words of it, because an expansion stands outside of quotes?"""
    at = 0
    while at < len(word):
        if word[at] in "$`":
            return True
        at = end_of(word, at)
    return False


def one_line(text: str) -> str:
    """The command as it is compared with a line of bash's listing."""
    return " ".join(text.split()).rstrip(";")


def words(text: str, before: str = "") -> list[Word]:
    """The words of a command as the script has them, without its redirections; or those that stand behind one: ``<``."""
    found: list[Word] = []
    at, sign, heredoc = 0, "", False
    while at < len(text):
        if text[at] in " \t\n":
            if text[at] == "\n" and heredoc:
                break
            at += 1
            continue
        redirect = REDIRECTS.match(text, at)
        if redirect:
            heredoc |= "<<" in redirect[0] and "<<<" not in redirect[0]
            at, sign = redirect.end(), redirect[0].lstrip("0123456789")
            continue
        start = at
        while (
            at < len(text)
            and text[at] not in " \t\n"
            and not (text[at] in "<>" and text[at + 1 : at + 2] != "(")
        ):
            at = end_of(text, at)
        if sign == before:
            found.append(Word(text[start:at], start, at))
        sign = ""
    return found


def assignment(word: str) -> tuple[str, bool, int]:
    """(name, is the value added to the old one?, the place where the value starts) of ``NAME=VALUE``"""
    match = ASSIGNS.match(word)
    assert match is not None, word
    return match[1], bool(match[2]), match.end()


def elements(word: str) -> list[str] | None:
    """The words between the parentheses of ``NAME=(...)``; None for any other word."""
    match = ASSIGNS.match(word)
    if match is None or not word.startswith("(", match.end()):
        return None
    return [one.text for one in words(word[match.end() + 1 : -1])]


def uses(text: str, start: int = 0) -> Iterator[Use]:
    """The variables that the expansions read; a command in ``$(...)`` is a command of its own."""
    at, quoted = 0, False
    while at < len(text):
        end = end_of(text, at, quoted)
        if text[at] in '("':  # the elements of an array are words of this command
            quoted, end = quoted ^ (text[at] == '"'), at + 1
        elif text.startswith(("$((", "$["), at):
            for name in re.findall(rf"{NAME}|\x02\d*\x03", _without_commands(text[at:end])):
                yield Use(name, start + at, start + end, False)
        elif text.startswith("${", at):
            yield from _braced(text[at:end], start + at)
        elif bare := _BARE.match(text, at):
            end = bare.end()
            yield Use(bare[1], start + at, start + end, bare[1] not in UNSTABLE)
        at = end


def _without_commands(text: str) -> str:
    """The text of `$((...))` without the commands whose outputs are in it."""
    kept, at = text[:2], 2
    while at < len(text):
        end = at + 1 if text[at] == "(" else end_of(text, at)
        kept, at = kept + ("" if has_command(text[at:end]) else text[at:end]), end
    return kept


def _braced(text: str, at: int) -> Iterator[Use]:
    match = _BRACED.fullmatch(text)
    if match is None:
        return
    made, name, index, use, rest = match.groups()
    plain = not made and name not in UNSTABLE and (not rest if use is None else use[-1] != "+")
    if made == "!" and not index:
        yield Use(f"!{name}", at, at + len(text), False)
    one_of = index is not None and index not in ("[@]", "[*]")
    yield Use(name, at, at + len(text), plain, use is not None and use[-1] != "?", one_of)
    if rest == "@P":  # a prompt, which may have the time in it
        yield Use("SECONDS", at, at + len(text), False)
    for one in uses(rest):
        yield Use(one.name, at, at + len(text), plain and one.plain, one.default or use is not None)
    for other in re.findall(NAME, index or ""):
        yield Use(other, at, at + len(text), False)


def has_command(text: str) -> bool:
    """Is the output of a command a part of the text?"""
    at, quoted = 0, False
    while at < len(text):
        if text[at] == "`" or (text.startswith("$(", at) and not text.startswith("$((", at)):
            return True
        if not quoted and text.startswith(("<(", ">("), at):
            return True
        end = at + 2 if text.startswith(("${", "$[", "$(("), at) else end_of(text, at, quoted)
        if text[at] in '("':
            quoted, end = quoted ^ (text[at] == '"'), at + 1
        at = end
    return False


def replaced(text: str, spans: list[tuple[int, int, str]]) -> str:
    """The text with other text in some places; a place inside another is left out."""
    found, at = "", 0
    for start, end, other in sorted(spans):
        if start >= at:
            found, at = found + text[at:start] + other, end
    return found + text[at:]
