"""The planning mask: the policy's tokens that belong to a strategic gram ("let me check", "what if we")."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from functools import cache, lru_cache
from itertools import pairwise

from verl_credit.credit.arguments import as_bool, check_shape
from verl_credit.credit.planning.token_text import BARRIER, Decode, policy_texts
from verl_credit.lazy import torch

STRATEGIC_GRAMS = (
    "wait let me", "let me think", "on second thought", "let me check", "let me verify", "is this right", "double check",
    "try another approach", "go back and", "start over", "that's not right", "that doesn't work", "another way to",
    "or we could", "what if we", "notice that", "the key is", "the key insight",
)  # fmt: skip
_APOSTROPHES = frozenset("'’‘‛ʼʻʹ`´′＇ꞌ")  # noqa: RUF001 - some of these are letters to Unicode
_KEY = "algorithm.strategic_grams"


def parse_grams(text_or_list: str | Iterable[str]) -> tuple[str, ...]:
    """Strategic grams from a JSON list (a string that begins with "["), a comma-separated string, or a list.

    Raises ValueError (TypeError for what is no string) that names the entry: blank ones, ones without a letter
    or digit, and repeats, two grams being the same if they differ in case, punctuation or apostrophes only.
    """
    entries = text_or_list
    if isinstance(entries, str) and entries.lstrip().startswith("["):
        try:
            entries = json.loads(entries)
        except json.JSONDecodeError as error:
            raise ValueError(f"{_KEY}={entries!r} is not a JSON list: {error}") from error
    elif isinstance(entries, str):
        entries = entries.split(",")
    elif not isinstance(entries, Iterable):
        raise TypeError(f"{_KEY}={entries!r}; expected a JSON list, a comma-separated string or a list")
    seen: dict[str, str] = {}
    for n, gram in enumerate(entries):
        if not isinstance(gram, str):
            raise TypeError(f"{_KEY}={text_or_list!r}: entry {n} is {gram!r}; expected a string")
        name = "_".join(fold("".join(c for c in gram if c not in _APOSTROPHES)).split())
        if not name:
            raise ValueError(f"{_KEY}={text_or_list!r}: entry {n} is {gram!r}; expected a phrase of words")
        if name in seen:
            raise ValueError(f"{_KEY}={text_or_list!r}: entry {n}, {gram!r}, repeats {seen[name]!r}")
        seen[name] = gram.strip()
    if not seen:
        raise ValueError(f"{_KEY}={text_or_list!r} holds no gram; expected at least one")
    return tuple(seen.values())


def fold(text: str) -> str:
    """The text for comparison, of the same length: letters and digits without case, spaces for all else."""
    return "".join(map(_folded, text))


@lru_cache(maxsize=16)
def compiled(grams: tuple[str, ...]) -> tuple[re.Pattern, dict[str, list[re.Pattern]]]:
    """Returns an expression that matches before each gram in folded text, and all grams by their first character."""
    patterns = [_pattern(gram.strip()) for gram in grams]
    by_letter: dict[str, list[re.Pattern]] = {}
    for pattern in patterns:
        by_letter.setdefault(pattern[0], []).append(re.compile(pattern))
    return re.compile(f"[ {BARRIER}](?={'|'.join(patterns)})"), by_letter


def _pattern(gram: str) -> str:
    """The quantifiers are possessive, so that a long space between two words is read once."""
    folded = fold(gram)
    words = list(re.finditer("[^ ]+", folded))
    pattern = words[0].group()
    for before, word in pairwise(words):
        between = gram[before.end() : word.start()]
        pattern += (" *+" if between in _APOSTROPHES else " ++") + word.group()
    return pattern + f"(?![^ {BARRIER}])"


@cache
def _folded(c: str) -> str:
    if not c.isalnum() or c in _APOSTROPHES:
        return " "
    return next((one for one in (c.casefold(), c.lower()) if len(one) == 1), c)


def planning_mask(
    token_ids_B_T: torch.Tensor,
    mask_B_T: torch.Tensor,
    decode: Decode,
    *,
    grams: str | Iterable[str] = STRATEGIC_GRAMS,
) -> torch.Tensor:
    """True for the policy's tokens that a strategic gram covers; bool B x T, on the device of the mask.

        planning[b, t] = 1  iff  a gram occupies characters [s, e) and token t is between the token with character s
                                 and the one with character e - 1, both included

    Only letters and digits are compared, without case; all other characters separate words, and one separator equals
    several. So commas, newlines, hyphens, markup and token boundaries do not matter. For an apostrophe between two
    letters of a gram the text may have any separators or none ("that's", "that’s", "that 's", "thats"). A gram begins
    and ends at word boundaries: "outlet me think" contains none, "what if we'd" contains one. Grams may overlap; each
    is found. A gram must be inside one run of consecutive policy tokens (mask 1): it cannot cross an observation, and
    observations are never marked.

    Shapes: token_ids_B_T integers (anything where the mask is 0), mask_B_T 0/1. `decode`: see `token_text.Decode`.
    Raises TypeError or ValueError that names the argument, the row and the value.

    Departures from the released code, which tests windows of tokens joined by spaces: no token outside a match
    is marked; a gram cut by a comma, a newline, a hyphen, an apostrophe or the tokenizer is found.
    Source: SEPA's planning detector; HICRA, Wang et al. 2509.03646 (whose grams are mined, not listed).
    """
    candidate, by_letter = compiled(parse_grams(grams))
    planning_B_T = torch.zeros(token_ids_B_T.shape, dtype=torch.bool)
    for chunk in policy_texts(token_ids_B_T, mask_B_T, decode, fold):
        spans = []
        for start in candidate.finditer(chunk.text):
            begin = start.end()
            matches = (pattern.match(chunk.text, begin) for pattern in by_letter[chunk.text[begin]])
            spans += [match.span() for match in matches if match]
        planning_B_T[chunk.rows] = chunk.covered(spans, token_ids_B_T.shape[1])
    return planning_B_T.to(mask_B_T.device)


def coverage(planning_B_T: torch.Tensor, mask_B_T: torch.Tensor) -> dict[str, float]:
    """How much of the policy's text is planning, whichever detector found it.

    planning/token_share    planning tokens / policy tokens, over the whole batch (token-weighted)
    planning/rows_with      rows with a planning token / rows with a policy token
    Both are 0 where there is nothing to divide by.
    """
    check_shape("planning_B_T", planning_B_T, mask_B_T.shape, "mask_B_T")
    mask_B_T = as_bool("mask_B_T", mask_B_T)
    planning_B_T = as_bool("planning_B_T", planning_B_T.masked_fill(~mask_B_T, 0))
    tokens, rows = int(mask_B_T.sum()), int(mask_B_T.any(dim=1).sum())
    return {
        "planning/token_share": int(planning_B_T.sum()) / max(1, tokens),
        "planning/rows_with": int(planning_B_T.any(dim=1).sum()) / max(1, rows),
    }
