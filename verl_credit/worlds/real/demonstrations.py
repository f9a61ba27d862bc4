"""Demonstrations of a search over two articles, written on training questions with the index's real results."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from verl_credit.turns.search.protocol import SCHEMA, Page, format_pages
from verl_credit.worlds.real.packages import RealError

Search = Callable[[str], list[Page]]  # query -> pages, best first
YES_NO = ("yes", "no")


@dataclass(frozen=True)
class Supported:
    """A question with the titles of the articles that support its answer."""

    prompt: list[dict]
    question: str
    answer: str
    titles: tuple[str, ...]


def demonstrations(question: Supported, search: Search, max_page_chars: int) -> list[list[dict]]:
    """Conversations that end with the answer, one per first query.

    The first query is the question itself, or the title of an article that the question names; the next one is the title
    of an article that is not among the pages yet, if the question or a page names it. A title that neither names, and an
    answer that is on no page, would teach the policy to invent things: such conversations are dropped. Answers yes and no
    are on no page and are kept when every article is among the pages.
    """
    if not question.titles:
        return []
    named = [_plain(title) for title in question.titles if _plain(title) in question.question]
    queries = [question.question, *named[:1]]
    conversations = (_converse(question, first, search, max_page_chars) for first in queries)
    return [messages for messages in conversations if messages is not None]


def _converse(question: Supported, first: str, search: Search, max_page_chars: int) -> list[dict] | None:
    messages, read, seen = list(question.prompt), "", set()
    queries = [first]
    while queries:
        query = queries.pop(0)
        pages = search(query)
        text = format_pages(pages, max_page_chars)
        messages += [_call(query), {"role": "tool", "content": text}]
        read += text
        seen |= {page.title for page in pages}
        known = question.question + read
        left = [t for t in question.titles if t not in seen and _plain(t) != query and _plain(t) in known]
        if left and len(messages) < 2 * len(question.titles) + len(question.prompt):
            queries = [_plain(left[0])]
    proven = set(question.titles) <= seen if question.answer in YES_NO else question.answer in read
    answer = {"role": "assistant", "content": f"<answer>{question.answer}</answer>"}
    return [*messages, answer] if proven else None


def _call(query: str) -> dict:
    arguments = {"query": query}
    call = {"type": "function", "function": {"name": SCHEMA["function"]["name"], "arguments": arguments}}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def _plain(title: str) -> str:
    """The title without its qualifier: "Kiss and Tell (1945 film)" becomes "Kiss and Tell"."""
    return re.sub(r" \([^)]*\)$", "", title)


def encode(messages: Sequence[dict], tokenizer, chat_template: str) -> tuple[list[int], list[int]]:
    """(token ids, 1 where the policy writes), as the chat template writes the conversation.

    The policy writes the template's text after the header of an assistant's turn, its end included. Raises RealError for a
    template that leaves a call out, or that writes earlier turns in another way when a turn follows.
    """
    ids: list[int] = []
    mask: list[int] = []
    text = ""
    for n, message in enumerate(messages):
        if message["role"] == "assistant":
            before = _text(messages[:n], tokenizer, chat_template, open_turn=True)
            answered = _text(messages[: n + 1], tokenizer, chat_template, open_turn=False).rstrip("\n")
            if not before.startswith(text) or not answered.startswith(before):
                raise RealError("the chat template writes earlier turns in another way when a turn follows")
            for call in message.get("tool_calls", ()):
                query = call["function"]["arguments"]["query"]
                if json.dumps(query, ensure_ascii=False) not in answered[len(before) :]:
                    raise RealError(
                        f"the chat template leaves out the search for {query!r}; expected one that writes tools"
                    )
            for part, by_policy in ((before[len(text) :], 0), (answered[len(before) :], 1)):
                new = tokenizer.encode(part, add_special_tokens=False)
                ids, mask = ids + new, mask + [by_policy] * len(new)
            text = answered
    return ids, mask


def _text(messages: Sequence[dict], tokenizer, chat_template: str, *, open_turn: bool) -> str:
    return tokenizer.apply_chat_template(
        list(messages),
        tools=[SCHEMA],
        chat_template=chat_template,
        tokenize=False,
        add_generation_prompt=open_turn,
    )
