"""Strategic grams: the phrases by which planning shows in a thought, in five categories."""

from __future__ import annotations

import re
from collections.abc import Sequence

GRAMS = {
    "hesitation": ("wait let me", "let me think", "on second thought"),
    "verification": ("let me check", "let me verify", "is this right", "double check"),
    "backtracking": (
        "try another approach",
        "go back and",
        "start over",
        "that's not right",
        "that doesn't work",
    ),
    "alternatives": ("another way to", "or we could", "what if we"),
    "insight": ("notice that", "the key is", "the key insight"),
}
# A gram that does not end a sentence goes on with this word.
_OPEN = {"wait let me", "go back and", "another way to", "or we could", "what if we"}

_PATTERN = re.compile("|".join(rf"\b{re.escape(g)}\b" for gs in GRAMS.values() for g in gs))


def phrase(gram: str) -> str:
    """The gram as it stands in a thought, with the leading space that makes each word one token."""
    return f" {gram} search" if gram in _OPEN else f" {gram}"


def gram_spans(text: str) -> list[tuple[int, int]]:
    """Character spans of every gram in ``text``."""
    return [m.span() for m in _PATTERN.finditer(text)]


def gram_token_mask(pieces: Sequence[str]) -> list[bool]:
    """Which tokens of a turn, given as their pieces of text, overlap a gram."""
    spans = gram_spans("".join(pieces))
    mask, start = [], 0
    for piece in pieces:
        end = start + len(piece)
        mask.append(any(begin < end and start < stop for begin, stop in spans))
        start = end
    return mask
