"""Calls of Llama 3.x: ``{"name": "search", "parameters": {...}}``, with or without ``<|python_tag|>`` before it."""

from __future__ import annotations

import re

from verl_credit.turns.rollout.calls.turn import TurnCalls, call_of, json_at

_OBJECT = r"""\{\s*"(?:name"\s*:|type"\s*:\s*"function")"""
_BEGIN = re.compile(rf"{_OBJECT}|<\|python_tag\|>(?!\s*{_OBJECT})")

_NEXT = re.compile(r"[;\n]|<\|eo[mt]_id\|>")


def read_llama3(text: str) -> TurnCalls:
    """Objects may follow each other with any text between. The tag before anything but such an object is a call that
    cannot be read: Llama writes the code of its built-in tools there. An object in Hermes' tags is not Llama's."""
    calls, content, opened, closed, place = [], text, 0, 0, 0
    while begin := _BEGIN.search(text, place):
        start, place = begin.span()
        if text[:start].rstrip().endswith("<tool_call>"):
            continue
        content, opened = (content, opened + 1) if opened else (text[:start], 1)
        if begin[0].startswith("{") and (found := json_at(text, start)):
            value, place = found
            closed += 1
            calls.append(call_of(value, "parameters", "arguments"))
        elif after := _NEXT.search(text, place):  # objects within a broken one are no further calls
            place = after.end()
        else:
            break
    return TurnCalls(content.removesuffix("<|python_tag|>"), [call for call in calls if call], opened, closed)
