"""Calls of tools in the text of a turn: what a parser of ours reads, and how many calls a turn shows, read or not.

A parser leaves out a call that it cannot read and says nothing. The agent loop counts the calls that a turn shows, so
that a broken call is a mistake of the policy in every format.
"""

from __future__ import annotations

import json
import re
from typing import NamedTuple

NO_TOOL = "hermes"
"""The format of a run whose policy calls no tool: verl makes a parser all the same."""
PARALLEL_CALLS = 4
"""``max_parallel_calls=auto``, but for templates that take one call a message."""
_DECODER = json.JSONDecoder()


class Call(NamedTuple):
    name: str
    arguments: str
    """JSON, as verl's parsers give it."""
    id: str | None = None
    """The id that the family's template demands in the call and in its result."""


class TurnCalls(NamedTuple):
    content: str
    """The text before the first call."""
    calls: list[Call]
    opened: int
    """Calls that the turn begins: those above, and those that cannot be read."""
    closed: int
    """Calls that the turn also ends."""


def _json_at(text: str, place: int) -> tuple[object, int] | None:
    """The JSON value that begins at ``place``, and where it ends; None where none can be read there."""
    try:
        return _DECODER.raw_decode(text, place)
    except (ValueError, RecursionError):
        return None


def _call_of(value: object, *names: str, id: str | None = None) -> Call | None:
    """The call in an object with a name and, under the first of ``names`` that it has, arguments."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    given = [value[name] for name in names if name in value]
    return Call(value["name"], json.dumps(given[0], ensure_ascii=False), id) if given else None


_NAME = re.compile(r"\s*([\w.-]+)(?:\[CALL_ID\](\w+))?(?:\[ARGS\])?\s*(?=\{)")
_ID = re.compile("[a-zA-Z0-9]{9}")


def read_mistral(text: str) -> TurnCalls:
    """Mistral: ``[TOOL_CALLS][{"name": ..., "arguments": ...}]``, and ``[TOOL_CALLS]name[ARGS]{...}`` since 2025. Every mark
    begins one call with a name, or a JSON list of calls."""
    content, *parts = text.split("[TOOL_CALLS]")
    calls: list[Call] = []
    opened = closed = 0
    for part in parts:
        named = _NAME.match(part)
        found = _json_at(part, named.end() if named else len(part) - len(part.lstrip()))
        values = [] if found is None else found[0] if isinstance(found[0], list) else [found[0]]
        if named:
            values = [{"name": named[1], "arguments": value, "id": named[2]} for value in values]
        for value in values:
            if call := _call_of(value, "arguments", id=_id(value, len(calls))):
                calls.append(call)
        opened += max(len(values), 1)
        closed += len(values)
    return TurnCalls(content, calls, opened, closed)


def _id(value: object, place: int) -> str:
    """The policy's id, or one of our own: Mistral's templates refuse a dialogue whose ids are not nine letters or digits."""
    given = value.get("id") if isinstance(value, dict) else None
    return given if isinstance(given, str) and _ID.fullmatch(given) else f"call{place:05d}"


_OBJECT = r"""\{\s*"(?:name"\s*:|type"\s*:\s*"function")"""
_BEGIN = re.compile(rf"{_OBJECT}|<\|python_tag\|>(?!\s*{_OBJECT})")
_NEXT = re.compile(r"[;\n]|<\|eo[mt]_id\|>")


def read_llama3(text: str) -> TurnCalls:
    """Llama 3.x: ``{"name": "search", "parameters": {...}}``, with or without ``<|python_tag|>`` before it.

    Objects may follow each other with any text between. The tag before anything but such an object is a call that
    cannot be read: Llama writes the code of its built-in tools there. An object in Hermes' tags is not Llama's.
    """
    calls, content, opened, closed, place = [], text, 0, 0, 0
    while begin := _BEGIN.search(text, place):
        start, place = begin.span()
        if text[:start].rstrip().endswith("<tool_call>"):
            continue
        content, opened = (content, opened + 1) if opened else (text[:start], 1)
        if begin[0].startswith("{") and (found := _json_at(text, start)):
            value, place = found
            closed += 1
            calls.append(_call_of(value, "parameters", "arguments"))
        elif after := _NEXT.search(text, place):  # objects within a broken one are no further calls
            place = after.end()
        else:
            break
    return TurnCalls(content.removesuffix("<|python_tag|>"), [call for call in calls if call], opened, closed)


READERS = {"llama3": read_llama3, "mistral": read_mistral}
"""Our readers by ``multi_turn.format``, for the families that no parser of verl 0.9.1 reads."""
_DSML = "\uff5cDSML\uff5c"
TAGS = ("<tool_call>", "</tool_call>")
HARMONY = (r"to=functions\.", r"<\|call\|>")
# Three formats have a mark around several calls: the mark counts as a call where none follows it.
MARKS = {
    **dict.fromkeys(("hermes", "qwen3_coder", "glm"), TAGS),
    **dict.fromkeys(("gpt-oss", "harmony"), HARMONY),
    "seed": ("<seed:tool_call>", "</seed:tool_call>"),
    "gemma4": (r"<\|tool_call>", r"<tool_call\|>"),
    "minimax": (r"<invoke name=|<minimax:tool_call>(?!\s*<invoke name=)", "</invoke>"),
    "kimi": (
        r"<\|tool_call_begin\|>|<\|tool_calls_section_begin\|>(?!\s*<\|tool_call_begin\|>)",
        r"<\|tool_call_end\|>",
    ),
    "deepseek_v4": (rf"<{_DSML}invoke |<{_DSML}tool_calls>(?!\s*<{_DSML}invoke )", f"</{_DSML}invoke>"),
}
"""Marks of a call by ``multi_turn.format``, as regular expressions."""
_ANY = {
    form: [re.compile("|".join(dict.fromkeys(pair))) for pair in zip(marks, TAGS, strict=True)]
    for form, marks in MARKS.items()
}


def shown_calls(text: str, form: str) -> tuple[int, int]:
    """(calls that the turn begins, calls that it also ends) in this format, and in Hermes' tags, in which any policy may
    write a call that the run does not read. A format that is the user's own has the tags alone."""
    opening, closing = _ANY.get(form, _ANY["hermes"])
    opened, closed = len(opening.findall(text)), len(closing.findall(text))
    if reader := READERS.get(form):
        own = reader(text)
        return own.opened + opened, own.closed + closed
    return opened, closed
