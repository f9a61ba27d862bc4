r"""Answers in the last ``\boxed{...}`` of a text, compared as numbers."""

from __future__ import annotations

import re
from collections.abc import Iterable
from fractions import Fraction

LONGEST_NUMBER = 200  # characters; Python refuses to parse much longer numbers

_BOX = re.compile(r"\\boxed\s*\{")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)  # an escaped brace does not count
_UNITS = re.compile(r"\\\$|\\%|\\,|\\!|\$|%")
_DECIMAL = r"[-+]?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d*)?|[-+]?\.\d+"
_NUMBER = re.compile(_DECIMAL, re.ASCII)
_SLASH = re.compile(rf"({_DECIMAL})\s*/\s*({_DECIMAL})", re.ASCII)
_FRAC = re.compile(rf"([-+]?)\\[dt]?frac\s*\{{\s*({_DECIMAL})\s*\}}\s*\{{\s*({_DECIMAL})\s*\}}", re.ASCII)


def extract_boxed(text: str) -> str | None:
    r"""The content of the last complete ``\boxed{...}``, braces balanced, stripped; None when there is none.

    One pass over the braces, so that the time is linear in the text's length.
    """
    last, opened = None, []
    boxes = {box.end() for box in _BOX.finditer(text)}
    for brace in _BRACE.finditer(text):
        if brace[0] == "{":
            opened.append(brace.end())
        elif brace[0] == "}" and opened:
            start = opened.pop()
            if start in boxes and (last is None or start > last.start):
                last = slice(start, brace.start())
    return None if last is None else text[last].strip()


def number(text: str) -> Fraction | None:
    r"""The exact number that ``text`` consists of; None for any other text.

    Integers, decimals, ``a/b`` and ``\frac{a}{b}``, with commas between groups of three digits. ``$``, ``%`` and LaTeX's
    thin spaces are dropped: "50\%" is 50, as in other scorers.
    """
    plain = _UNITS.sub("", text.replace("{,}", ",").replace("\u2212", "-")).strip()
    if len(plain) > LONGEST_NUMBER:
        return None
    if _NUMBER.fullmatch(plain):
        return _fraction(plain)
    if found := _SLASH.fullmatch(plain):
        return _quotient(*found.groups())
    if found := _FRAC.fullmatch(plain):
        value = _quotient(*found.groups()[1:])
        return -value if value is not None and found[1] == "-" else value
    return None


def _fraction(decimal: str) -> Fraction:
    return Fraction(decimal.replace(",", "").rstrip("."))


def _quotient(above: str, below: str) -> Fraction | None:
    return _fraction(above) / _fraction(below) if _fraction(below) else None


def boxed_match(prediction: str | None, golds: Iterable[str]) -> float:
    """1.0 when the prediction is the same number as any gold answer, else 0.0.

    A gold answer that is not a number is compared as text without white space.
    """
    if prediction is None:
        return 0.0
    return float(any(_same(prediction, gold) for gold in golds))


def _same(prediction: str, gold: str) -> bool:
    wanted = number(gold)
    if wanted is not None:
        return number(prediction) == wanted
    return "".join(prediction.split()) == "".join(gold.split()) != ""
