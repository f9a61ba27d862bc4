"""Retrieved pages: parsed from a retriever's answer, and formatted as the policy's observation."""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Page:
    """One document; its title is the first line of its contents, its text the rest."""

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
    return [_page(hit["document"], hit["score"]) for hit in hits]


def _page(document: dict, score: object) -> Page:
    name, contents = document["id"], document["contents"]
    if isinstance(score, bool) or not isinstance(score, int | float) or not math.isfinite(score):
        raise ValueError("a hit without a finite score")
    if isinstance(name, bool) or not isinstance(name, str | int) or not isinstance(contents, str):
        raise ValueError("a hit without id or text")
    contents.encode()  # raises for a lone surrogate, which JSON allows and a tokenizer does not
    title, _, text = contents.partition("\n")
    return Page(str(name), title, text, float(score))
