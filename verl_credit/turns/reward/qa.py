"""Outcome reward of question answering: exact match after SQuAD's normalisation.

The answer is the content of the last complete ``<answer>...</answer>`` of the trajectory's last turn. A trajectory
without one scores 0. An optional format penalty is a separate component with its own metric, not part of exact match.

A row whose ground truth has ``"form": "boxed"`` (mathematics) is answered in the last ``\\boxed{...}`` and compared as a
number.

Pure Python without verl, so that the lab's gate and a notebook score exactly as training does.
"""

from __future__ import annotations

import math
import re
import string
from collections import Counter
from collections.abc import Iterable, Mapping
from decimal import Decimal
from fractions import Fraction
from numbers import Real

from verl_credit.names import ROW_RECORD

TAG, BOXED = "tag", "boxed"
FORMS = (TAG, BOXED)
"""The values of ``ground_truth["form"]``: the form of a row's answer, by default ``tag``."""

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)
_OPEN, _CLOSE = "<answer>", "</answer>"
_WHOLE = ("yes", "no", "noanswer")


def normalize_answer(text: str) -> str:
    """SQuAD normalisation: lower case, no punctuation, no articles, single spaces."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def extract_answer(text: str) -> str | None:
    """The content of the last complete answer tag, stripped; None when there is no such tag.

    Tags are paired from the left, each opening one with the next closing one, in time linear in the text's length.
    """
    answer, end = None, 0
    while (start := text.find(_OPEN, end)) >= 0 and (close := text.find(_CLOSE, start + len(_OPEN))) >= 0:
        answer, end = text[start + len(_OPEN) : close], close + len(_CLOSE)
    return None if answer is None else answer.strip()


def exact_match(prediction: str | None, golds: Iterable[str]) -> float:
    """1.0 when the normalised prediction equals any normalised gold alias, else 0.0.

    An alias that normalises to nothing ("The", "!") is compared as written, case folded; otherwise an empty prediction
    would match it.
    """
    if prediction is None:
        return 0.0
    for gold in golds:
        wanted = normalize_answer(gold)
        if wanted and normalize_answer(prediction) == wanted:
            return 1.0
        if not wanted and prediction.strip().lower() == gold.strip().lower() != "":
            return 1.0
    return 0.0


def token_f1(prediction: str | None, golds: Iterable[str]) -> float:
    """Largest bag-of-words F1 of the normalised prediction against any alias.

    As in HotpotQA's official script, "yes", "no" and "noanswer" are right as a whole or not at all, on either side.
    """
    if prediction is None:
        return 0.0
    return max((_f1(normalize_answer(prediction), normalize_answer(gold)) for gold in golds), default=0.0)


def _f1(prediction: str, wanted: str) -> float:
    if prediction != wanted and (prediction in _WHOLE or wanted in _WHOLE):
        return 0.0
    predicted, gold = prediction.split(), wanted.split()
    common = sum((Counter(predicted) & Counter(gold)).values())
    if not common:
        return 0.0
    precision, recall = common / len(predicted), common / len(gold)
    return 2 * precision * recall / (precision + recall)


def gold_answers(ground_truth) -> list[str]:
    """All aliases from a row's ``reward_model.ground_truth``: ``{"target": [..]}``, a list, or one answer.

    A number is read as text, 42.0 as "42". Raises ValueError without a usable gold answer: such a row would teach the
    policy that every answer is wrong.
    """
    target = ground_truth.get("target") if hasattr(ground_truth, "get") else ground_truth
    if isinstance(target, str) or not isinstance(target, Iterable):
        target = [target]
    texts = [] if isinstance(target, Mapping | bytes) else [_as_text(gold) for gold in target]
    golds = [text for text in texts if text.strip()]
    if not golds:
        raise ValueError(
            f"reward_model.ground_truth is {ground_truth!r}: expected {{'target': [gold, ...]}} with at least one "
            "non-empty gold answer, text or number"
        )
    return golds


def _as_text(gold: object) -> str:
    """The answer as text; "" for None, not-a-number, true and false, and nested values."""
    if isinstance(gold, str):
        return gold
    if isinstance(gold, bool) or not isinstance(gold, Real | Decimal) or not math.isfinite(gold):
        return ""
    return str(int(gold) if gold == int(gold) else gold)


def answer_form(ground_truth) -> str:
    """``tag`` or ``boxed``, by default ``tag``. Raises ValueError for anything else."""
    return stated_form(ground_truth) or TAG


def stated_form(ground_truth) -> str | None:
    """The row's ``form``: ``tag``, ``boxed`` or None. Raises ValueError for anything else."""
    form = (ground_truth.get("form") if hasattr(ground_truth, "get") else None) or None
    if form is not None and form not in FORMS:
        raise ValueError(f"reward_model.ground_truth.form is {form!r}: expected one of {', '.join(FORMS)}")
    return form


def final_answer(text: str, ground_truth) -> str | None:
    """The answer in the text, in the row's form; None when there is none."""
    return extract_boxed(text) if answer_form(ground_truth) == BOXED else extract_answer(text)


def compute_score(
    data_source: str, solution_str: str, ground_truth, extra_info=None, format_penalty: float = 0.0
) -> dict[str, float]:
    """verl's ``custom_reward_function`` contract.

    score = em - format_penalty * [no answer];  ``em``, ``f1``, ``format_ok`` go to the metrics.
    The search agent's record contains the policy's own last turn. ``solution_str`` also contains observations, and an
    answer tag inside a retrieved page must not count.
    """
    golds = gold_answers(ground_truth)
    record = (extra_info or {}).get(ROW_RECORD)
    answer = final_answer(record["final_text"] if record else solution_str, ground_truth)
    boxed = answer_form(ground_truth) == BOXED
    em = boxed_match(answer, golds) if boxed else exact_match(answer, golds)
    penalty = 0.0 if answer is not None else float(format_penalty)
    return {
        "score": em - penalty,
        "em": em,
        "f1": em if boxed else token_f1(answer, golds),  # F1 over words makes no sense for a number
        "format_ok": float(answer is not None),
        "format_penalty": penalty,
        "tool_fault": float(bool(record and record["tool_fault"])),
    }


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
    text = "".join(prediction.split())
    for gold in golds:
        wanted, plain = number(gold), "".join(gold.split())
        if plain and (text == plain if wanted is None else number(prediction) == wanted):
            return 1.0
    return 0.0
