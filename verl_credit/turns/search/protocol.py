"""The search tool as the policy sees it: its schema, the check of a query, and the pages of an observation."""

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass

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


@dataclass(frozen=True)
class Page:
    """A document; its title is the first line of its contents, its text the rest."""

    id: str
    title: str
    text: str
    score: float


def format_pages(pages: list[Page], max_page_chars: int) -> str:
    """The observation that the policy reads: "Page 1: Title\\ntext\\nPage 2: ...".

    Texts and titles are cut to `max_page_chars`: contents without a line break are all title.
    """
    lines = []
    for number, page in enumerate(pages, start=1):
        lines.append(f"Page {number}: {page.title[:max_page_chars]}")
        if text := page.text[:max_page_chars]:
            lines.append(text)
    return "\n".join(lines)


def parse_answer(answer: object, topk: int) -> list[Page]:
    """Pages from the JSON of POST /retrieve for one query with scores; title = first line of the contents.

    Errors: ValueError, KeyError, TypeError or OverflowError unless there are 1 to `topk` hits, each with a string or
    integer id, contents that UTF-8 can encode and a finite score. An answer without a hit is an error, because a
    working retriever always finds something.
    """
    (hits,) = answer["result"]
    if not isinstance(hits, list) or not 1 <= len(hits) <= topk:
        raise ValueError(f"expected 1 to {topk} hits")
    pages = []
    for hit in hits:
        name, contents, score = hit["document"]["id"], hit["document"]["contents"], hit["score"]
        if isinstance(score, bool) or not isinstance(score, int | float) or not math.isfinite(score):
            raise ValueError("a hit without a finite score")
        if isinstance(name, bool) or not isinstance(name, str | int) or not isinstance(contents, str):
            raise ValueError("a hit without id or text")
        contents.encode()  # raises for a lone surrogate, which JSON allows and a tokenizer does not
        title, _, text = contents.partition("\n")
        pages.append(Page(str(name), title, text, float(score)))
    return pages
