"""What a reader finds in a turn."""

from __future__ import annotations

import json
from typing import NamedTuple

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


def json_at(text: str, place: int) -> tuple[object, int] | None:
    """The JSON value that begins at ``place``, and where it ends; None where none can be read there."""
    try:
        return _DECODER.raw_decode(text, place)
    except (ValueError, RecursionError):
        return None


def call_of(value: object, *names: str, id: str | None = None) -> Call | None:
    """The call in an object with a name and, under the first of ``names`` that it has, arguments."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    for name in names:
        if name in value:
            return Call(value["name"], json.dumps(value[name], ensure_ascii=False), id)
    return None
