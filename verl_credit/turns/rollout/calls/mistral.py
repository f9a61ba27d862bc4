"""Calls of Mistral: ``[TOOL_CALLS][{"name": ..., "arguments": ...}]``, and ``[TOOL_CALLS]name[ARGS]{...}`` since 2025."""

from __future__ import annotations

import re

from verl_credit.turns.rollout.calls.turn import Call, TurnCalls, call_of, json_at

MARK = "[TOOL_CALLS]"
_NAME = re.compile(r"\s*([\w.-]+)(?:\[CALL_ID\](\w+))?(?:\[ARGS\])?\s*(?=\{)")
_ID = re.compile("[a-zA-Z0-9]{9}")


def read_mistral(text: str) -> TurnCalls:
    """Every mark begins one call with a name, or a JSON list of calls."""
    content, *parts = text.split(MARK)
    calls: list[Call] = []
    opened = closed = 0
    for part in parts:
        named = _NAME.match(part)
        found = json_at(part, named.end() if named else len(part) - len(part.lstrip()))
        values = [] if found is None else found[0] if isinstance(found[0], list) else [found[0]]
        if named:
            values = [{"name": named[1], "arguments": value, "id": named[2]} for value in values]
        for value in values:
            if call := call_of(value, "arguments", id=_id(value, len(calls))):
                calls.append(call)
        opened += max(len(values), 1)
        closed += len(values)
    return TurnCalls(content, calls, opened, closed)


def _id(value: object, place: int) -> str:
    """The policy's id, or one of our own: Mistral's templates refuse a dialogue whose ids are not nine letters or digits."""
    given = value.get("id") if isinstance(value, dict) else None
    return given if isinstance(given, str) and _ID.fullmatch(given) else f"call{place:05d}"
