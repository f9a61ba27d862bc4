"""The search tool as the policy sees it: its schema, what it may ask, what it may be shown."""

from __future__ import annotations

import json
from collections.abc import Iterable

MAX_QUERY_CHARS = 2000


SCHEMA = {
    "type": "function",
    "function": {
        "name": "search",
        "description": "Searches the encyclopedia and returns the best matching pages.",
        "parameters": {
            "type": "object",
            "properties": {"query": {"type": "string", "description": "What to look for."}},
            "required": ["query"],
        },
    },
}


def bad_query_reason(arguments: str) -> tuple[str | None, str]:
    """(what is wrong with the call's arguments or None, the query). The policy's mistake, so it is told."""
    try:
        parsed = json.loads(arguments)
    except (json.JSONDecodeError, TypeError) as error:
        return f"Error: the arguments of search are not valid JSON ({error}).", ""
    query = parsed.get("query") if isinstance(parsed, dict) else None
    if not isinstance(query, str) or not query.strip():
        return "Error: search needs a non-empty string argument 'query'.", ""
    if len(query) > MAX_QUERY_CHARS:
        return f"Error: the query is longer than {MAX_QUERY_CHARS} characters.", ""
    try:
        query.encode()
    except UnicodeEncodeError:  # a lone surrogate written as \\udXXX: no server can be asked for it
        return "Error: the query is not valid text.", ""
    return None, query


def without_markup(text: str, control_tokens: Iterable[str]) -> str:
    """Control tokens inside a page are broken up: a page must not be able to end the observation.

    "</tool_response>" becomes "< /tool_response>"; ordinary text, HTML included, stays.
    """
    for token in control_tokens:
        text = text.replace(token, f"{token[0]} {token[1:]}")
    return text


def control_tokens(tokenizer) -> tuple[str, ...]:
    """The tokenizer's added tokens that look like markup (``<...>``)."""
    return tuple(sorted(t for t in tokenizer.get_added_vocab() if t.startswith("<") and t.endswith(">")))
