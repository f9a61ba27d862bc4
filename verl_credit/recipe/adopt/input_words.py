"""The words of a program that xargs or GNU parallel starts: a mark stands in them where they are made of what is read."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence

_PLACE = re.compile(r"(?<!\$)\{[\w./#%+-]*\}")
"""What parallel replaces in its command: {}, {.}, {1}, ..."""
_REPLACES = re.compile(r"-I(.*)|(?:-i|--replace=?)(.*)", re.DOTALL)
"""The option of xargs that says what it replaces: {} where it says nothing."""
_VALUED = ("-I", "-n", "-L", "-P", "-s", "-d", "-a", "-E", "-j", "-N", "-S", "--jobs", "--delay")


def with_input(words: Sequence[str], mark: str) -> list[str]:
    """The words where xargs or parallel starts a program; the same ones where neither does."""
    names = [os.path.basename(word) for word in words]
    start = next((n for n, name in enumerate(names) if name in ("xargs", "parallel")), len(words))
    end = next((n for n, word in enumerate(words) if word.startswith(":::")), len(words))
    command, replaced = start + 1, _PLACE
    while command < end and words[command].startswith("-"):
        if names[start] == "xargs" and (match := _REPLACES.fullmatch(words[command])):
            own = words[command + 1] if words[command] == "-I" else match[1] or match[2] or "{}"
            replaced = re.compile(re.escape(own))
        command += 1 + (words[command] in _VALUED)
    if command >= end:  # parallel starts each of the words behind :::
        return [*words]
    if names[start] == "xargs" and replaced is _PLACE:
        return [*words, mark]
    made = [*words[:command], *(replaced.sub(mark, word) for word in words[command:end])]
    return made if made != [*words[:end]] else [*made, mark]
