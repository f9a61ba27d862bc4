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
    """The observation a policy reads: "Page 1: Title\\ntext\\nPage 2: ...", texts cut to `max_page_chars`."""
    lines = []
    for number, page in enumerate(pages, start=1):
        lines.append(f"Page {number}: {page.title}")
        if text := page.text[:max_page_chars]:
            lines.append(text)
    return "\n".join(lines)


def parse_answer(answer: object, topk: int) -> list[Page]:
    """Pages from the JSON of POST /retrieve for one query with scores; title = first line of the contents.

    Errors: ValueError, KeyError or TypeError for anything else than 1 to `topk` hits with text and finite
    score; no hit is one of them, because a retriever that works always finds something.
    """
    (hits,) = answer["result"]
    if not isinstance(hits, list) or not 1 <= len(hits) <= topk:
        raise ValueError(f"expected 1 to {topk} hits")
    pages = []
    for hit in hits:
        document, score = hit["document"], hit["score"]
        contents = document["contents"]
        if not isinstance(contents, str) or not isinstance(score, int | float) or not math.isfinite(score):
            raise ValueError("a hit without text or without a finite score")
        title, _, text = contents.partition("\n")
        pages.append(Page(str(document["id"]), title, text, float(score)))
    return pages
