"""The search tool as the policy sees it: its schema, the check of a query, and the pages of an observation."""

import hashlib
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from sys import float_info
from typing import Any

MAX_QUERY_CHARS = 2000
SCHEMA: dict[str, Any] = {
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
    """The text with its control tokens broken up, so that a page cannot end the observation or forge a turn.

    "</tool_response>" becomes "< /tool_response>"; ordinary text, HTML included, stays. Every observation of our loops
    passes here: pages, what other tools return, and errors.
    """
    for token in control_tokens:
        while token in text:  # "[e~[e~[" holds the token "[e~[" twice, and replacing breaks up the first
            text = text.replace(token, f"{token[0]} {token[1:]}")
    return text


def control_tokens(tokenizer) -> tuple[str, ...]:
    """The tokenizer's added tokens that are special ("<|im_end|>", "[INST]") or have the form of markup: signs around
    letters or digits ("[/TOOL_RESULTS]", "]~b]", "<tool_call>"), or anything in angle brackets."""
    added = {str(token): token.special for token in tokenizer.added_tokens_decoder.values()}
    special = {*tokenizer.all_special_tokens, *(text for text, is_special in added.items() if is_special)}
    markup = {text for text in (*added, *tokenizer.get_added_vocab()) if _MARKUP.fullmatch(text)}
    return tuple(sorted(markup | {text for text in special if len(text.strip()) > 1}))


_MARKUP = re.compile(r"<.*>|[^\w\s].*\w.*[^\w\s]", re.DOTALL)


@dataclass(frozen=True)
class Page:
    """A document; its title is the first line of its contents, its text the rest."""

    id: str
    title: str
    text: str
    score: float | None


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


def parse_answer(answer: Any, topk: int) -> list[Page]:
    """The first `topk` pages of the JSON of POST /retrieve for one query; none where the server found nothing.

    Search-R1's servers are read alike: dense (id, contents, score), BM25 (title, text, contents, no id), and SERP and
    Google (contents alone, as many hits as they were started with). Without an id a page has a hash of its contents.
    Errors: ValueError names what the answer lacks.
    """
    result = answer.get("result") if isinstance(answer, dict) else None
    if not isinstance(result, list) or len(result) != 1 or not isinstance(result[0], list):
        raise ValueError('expected {"result": [[hit, ...]]}, a list with one list of hits for the one query')
    return [_page(hit) for hit in result[0][:topk]]


def _page(hit: Any) -> Page:
    document = hit.get("document") if isinstance(hit, dict) else None
    if not isinstance(document, dict):
        raise ValueError('a hit without "document"; expected {"document": {"contents": ...}, "score": ...}')
    contents = document.get("contents", document.get("text"))
    if "contents" not in document and isinstance(document.get("title"), str):
        contents = f"{document['title']}\n{contents}" if isinstance(contents, str) else None
    if not isinstance(contents, str):
        raise ValueError('a document without text; expected a string "contents", or "title" and "text"')
    try:
        encoded = contents.encode()
    except UnicodeEncodeError:  # JSON allows it, and a tokenizer does not
        raise ValueError("a document whose text holds a lone surrogate") from None
    name = document.get("id", hashlib.sha256(encoded).hexdigest()[:16])
    if isinstance(name, bool) or not isinstance(name, str | int):
        raise ValueError(
            f'a document with "id": {str(name)[:40]!r}; expected text, a whole number, or no "id"'
        )
    score = hit.get("score", 0.0)
    if isinstance(score, bool) or not isinstance(score, int | float) or not abs(score) <= float_info.max:
        raise ValueError('a hit whose "score" is not finite; expected a number, or no "score"')
    title, _, text = contents.partition("\n")
    return Page(str(name), title, text, float(score) if "score" in hit else None)
