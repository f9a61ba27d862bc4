"""Retrieved pages: read from a retriever's answer, written as the observation a policy reads."""

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
    """The observation a policy reads: "Page 1: Title\\ntext\\nPage 2: ...".

    Texts are cut to `max_page_chars`, and so are titles: contents without a line break are all title.
    """
    lines = []
    for number, page in enumerate(pages, start=1):
        lines.append(f"Page {number}: {page.title[:max_page_chars]}")
        if text := page.text[:max_page_chars]:
            lines.append(text)
    return "\n".join(lines)


def parse_answer(answer: object, topk: int) -> list[Page]:
    """Pages from the JSON of POST /retrieve for one query with scores; title = first line of the contents.

    Errors: ValueError, KeyError, TypeError or OverflowError for anything else than 1 to `topk` hits, each with a
    text or whole number as id, text that UTF-8 can hold and a finite score. No hit is one of them, because a
    retriever that works always finds something.
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
    contents.encode()  # JSON can hold half a character (a lone surrogate), a tokenizer cannot
    title, _, text = contents.partition("\n")
    return Page(str(name), title, text, float(score))
