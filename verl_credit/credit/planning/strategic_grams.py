"""Strategic grams, the phrases by which planning shows: the list, how one is written, when two are the same."""

import json
import re
from collections.abc import Iterable
from functools import lru_cache
from itertools import pairwise

from verl_credit.credit.planning.token_text import BARRIER

STRATEGIC_GRAMS = (
    "wait let me",
    "let me think",
    "on second thought",
    "let me check",
    "let me verify",
    "is this right",
    "double check",
    "try another approach",
    "go back and",
    "start over",
    "that's not right",
    "that doesn't work",
    "another way to",
    "or we could",
    "what if we",
    "notice that",
    "the key is",
    "the key insight",
)
_APOSTROPHES = frozenset("'’‘‛ʼʻʹ`´′＇ꞌ")  # noqa: RUF001 - some of these are letters to Unicode
_KEY = "algorithm.strategic_grams"


def parse_grams(text_or_list: str | Iterable[str]) -> tuple[str, ...]:
    """Strategic grams from a JSON list (a string that begins with "["), a comma-separated string, or a list.

    Raises ValueError (TypeError for what is no string) that names the entry: blank ones, ones without a letter
    or digit, and repeats, two grams being the same if they differ in case, punctuation or apostrophes only.
    """
    entries = text_or_list
    if isinstance(entries, str):
        entries = _from_json(entries) if entries.lstrip().startswith("[") else entries.split(",")
    elif not isinstance(entries, Iterable):
        raise TypeError(f"{_KEY}={entries!r}; expected a JSON list, a comma-separated string or a list")
    seen: dict[str, str] = {}
    for n, gram in enumerate(entries):
        if not isinstance(gram, str):
            raise TypeError(f"{_KEY}={text_or_list!r}: entry {n} is {gram!r}; expected a string")
        name = gram_name(gram)
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
    return text.translate(_FOLDED)


def gram_name(gram: str) -> str:
    """Words joined by "_" without apostrophes; equal for different spellings of one gram."""
    return "_".join(fold("".join(c for c in gram if c not in _APOSTROPHES)).split())


@lru_cache(maxsize=16)
def compiled(grams: tuple[str, ...]) -> tuple[re.Pattern, dict[str, list[tuple[int, re.Pattern]]]]:
    """For folded text: an expression that matches before each gram, and all grams by their first character."""
    patterns = [_pattern(gram.strip()) for gram in grams]
    by_letter: dict[str, list[tuple[int, re.Pattern]]] = {}
    for n, pattern in enumerate(patterns):
        by_letter.setdefault(pattern[0], []).append((n, re.compile(pattern)))
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


def _from_json(text: str) -> list:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{_KEY}={text!r} is not a JSON list: {error}") from error


class _Folded(dict):
    """A table for str.translate that examines each character once."""

    def __missing__(self, code: int) -> str:
        c = chr(code)
        if not c.isalnum() or c in _APOSTROPHES:
            self[code] = " "
        else:
            self[code] = next((one for one in (c.casefold(), c.lower()) if len(one) == 1), c)
        return self[code]


_FOLDED = _Folded()
