"""The search tool as the policy sees it: its schema, the check of a query, and the escaping of pages."""

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
    """(an error message for the policy, or None; the query) from the arguments of a tool call."""
    try:
        parsed = json.loads(arguments)
    except (ValueError, TypeError, RecursionError) as error:
        return f"Error: the arguments of search are not valid JSON ({error}).", ""
    query = parsed.get("query") if isinstance(parsed, dict) else None
    if not isinstance(query, str) or not query.strip():
        return "Error: search needs a non-empty string argument 'query'.", ""
    if len(query) > MAX_QUERY_CHARS:
        return f"Error: the query is longer than {MAX_QUERY_CHARS} characters.", ""
    try:
        query.encode()
    except UnicodeEncodeError:  # a lone surrogate written as \\udXXX, which cannot be sent to a server
        return "Error: the query is not valid text.", ""
    return None, query


def without_markup(text: str, control_tokens: Iterable[str]) -> str:
    """The text with its control tokens broken up, so that a page cannot end the observation.

    "</tool_response>" becomes "< /tool_response>"; ordinary text, HTML included, stays.
    """
    for token in control_tokens:
        text = text.replace(token, f"{token[0]} {token[1:]}")
    return text


def control_tokens(tokenizer) -> tuple[str, ...]:
    """The tokenizer's added tokens that look like markup (``<...>``)."""
    return tuple(sorted(t for t in tokenizer.get_added_vocab() if t.startswith("<") and t.endswith(">")))
