"""The marks between which verl's parsers expect a call."""

from __future__ import annotations

import re
from typing import NamedTuple

_DSML = "\uff5cDSML\uff5c"


class Marks(NamedTuple):
    opening: str
    closing: str


TAGS = Marks("<tool_call>", "</tool_call>")
HARMONY = Marks(r"to=functions\.", r"<\|call\|>")
# Three formats have a mark around several calls: the mark counts as a call where none follows it.
MARKS = {
    **dict.fromkeys(("hermes", "qwen3_coder", "glm"), TAGS),
    **dict.fromkeys(("gpt-oss", "harmony"), HARMONY),
    "seed": Marks("<seed:tool_call>", "</seed:tool_call>"),
    "gemma4": Marks(r"<\|tool_call>", r"<tool_call\|>"),
    "minimax": Marks(r"<invoke name=|<minimax:tool_call>(?!\s*<invoke name=)", "</invoke>"),
    "kimi": Marks(
        r"<\|tool_call_begin\|>|<\|tool_calls_section_begin\|>(?!\s*<\|tool_call_begin\|>)",
        r"<\|tool_call_end\|>",
    ),
    "deepseek_v4": Marks(rf"<{_DSML}invoke |<{_DSML}tool_calls>(?!\s*<{_DSML}invoke )", f"</{_DSML}invoke>"),
}
"""Marks of a call by ``multi_turn.format``, as regular expressions."""
_ANY = {
    form: [re.compile("|".join(dict.fromkeys(pair))) for pair in zip(marks, TAGS, strict=True)]
    for form, marks in MARKS.items()
}


def marked(text: str, form: str) -> tuple[int, int]:
    """(opening marks, closing marks) of this format and Hermes' tags. A format that is the user's own has the tags alone."""
    opening, closing = _ANY.get(form, _ANY["hermes"])
    return len(opening.findall(text)), len(closing.findall(text))
