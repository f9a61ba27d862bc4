"""Outcome reward of question answering: exact match after SQuAD's normalisation.

The answer stands in ``<answer>...</answer>`` in the trajectory's last turn (`extract_answer`). A trajectory without one
scores 0. An optional format penalty is a separate component with its own metric, not part of exact match.

A row whose ground truth has ``"form": "boxed"`` (mathematics) is answered in the last ``\\boxed{...}`` and compared as a
number.

Pure Python without verl, so that the lab's gate and a notebook score exactly as training does.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Callable, Iterable
from fractions import Fraction

from verl_credit.names import ROW_RECORD
from verl_credit.turns.rollout.reward.env_record import scores
from verl_credit.turns.rollout.reward.golds import decoded, gold_answers
from verl_credit.turns.rollout.thoughts import without_thoughts

TAG, BOXED = "tag", "boxed"
FORMS = (TAG, BOXED)
"""The values of ``ground_truth["form"]``: the form of a row's answer, by default ``tag``."""

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)
_TAGS = re.compile("(</?answer>)")
_PAIR = ("<answer>", "</answer>")
_MENTIONS = ("", "and", "...", "…")
WHOLE = ("yes", "no", "noanswer")


def normalize_answer(text: str) -> str:
    """SQuAD normalisation: lower case, no punctuation, no articles, single spaces."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def extract_answer(text: str) -> str | None:
    """The answer in the text, stripped; None when there is none.

    An answer is the text between an opening tag and the closing one that is the next tag. The last answer counts. Between
    such tags nothing, "and" or dots only mention them ("I write it between <answer> and </answer>") and are the answer where
    there is no other. The time is linear in the text's length.

    Departures from Search-R1's released reward (``qa_em.py``): it pairs every opening tag with the next closing one, so that
    a tag that is mentioned becomes a part of the answer ("in <answer> tags. <answer>Paris</answer>"), and takes the last
    pair, also a mention. It scores the text with the prompt, and counts on a pair in there: with one pair in all it finds no
    answer. Here the text is the policy's own, and one pair is enough.
    """
    parts = _TAGS.split(text)
    found = [
        parts[place + 1].strip()
        for place in range(1, len(parts) - 2, 2)
        if (parts[place], parts[place + 2]) == _PAIR
    ]
    return _last(found)


def _last(found: list[str]) -> str | None:
    answers = [answer for answer in found if answer not in _MENTIONS] or found
    return answers[-1] if answers else None


def exact_match(prediction: str | None, golds: Iterable[str]) -> float:
    """1.0 when the prediction equals any gold alias after the alias's normalisation, else 0.0.

    That is SQuAD's. An alias of which it leaves nothing ("A", "The The", "!") keeps its articles, and then its punctuation:
    otherwise an empty prediction would match it, or none.
    """
    if prediction is None:
        return 0.0
    pairs = (_compared(prediction, gold) for gold in golds)
    return float(any(predicted == wanted != "" for predicted, wanted in pairs))


def token_f1(prediction: str | None, golds: Iterable[str]) -> float:
    """Largest bag-of-words F1 of the prediction against any alias, both normalised as for exact match.

    As in HotpotQA's official script, "yes", "no" and "noanswer" are right as a whole or not at all, on either side.
    """
    if prediction is None:
        return 0.0
    return max((_f1(*_compared(prediction, gold)) for gold in golds), default=0.0)


def _compared(prediction: str, gold: str) -> tuple[str, str]:
    """(prediction, gold) in the form in which they are compared."""
    step, wanted = comparison(gold)
    return step(prediction), wanted


def comparison(gold: str) -> tuple[Callable[[str], str], str]:
    """The function that brings a text into the form in which it is compared with the gold answer, and the answer in it."""
    steps: tuple[Callable[[str], str], ...] = (normalize_answer, _with_articles, _as_it_stands)
    step = next((step for step in steps if step(gold)), _as_it_stands)
    return step, step(gold)


def stands_in(text: str, golds: Iterable[str]) -> bool:
    """Does an alias stand in the text, as whole words, in the form in which answers are compared?"""
    forms: dict[Callable[[str], str], str] = {}
    for step, wanted in map(comparison, golds):
        if step not in forms:
            forms[step] = f" {step(text)} "
        if wanted and f" {wanted} " in forms[step]:
            return True
    return False


def _with_articles(text: str) -> str:
    return _as_it_stands(text.translate(_PUNCTUATION))


def _as_it_stands(text: str) -> str:
    return " ".join(text.lower().split())


def _f1(prediction: str, wanted: str) -> float:
    if prediction != wanted and (prediction in WHOLE or wanted in WHOLE):
        return 0.0
    predicted, gold = prediction.split(), wanted.split()
    common = sum((Counter(predicted) & Counter(gold)).values())
    if not common:
        return 0.0
    precision, recall = common / len(predicted), common / len(gold)
    return 2 * precision * recall / (precision + recall)


def answer_form(ground_truth) -> str:
    """``tag`` or ``boxed``, by default ``tag``. Raises ValueError for anything else."""
    return stated_form(ground_truth) or TAG


def stated_form(ground_truth) -> str | None:
    """The row's ``form``: ``tag``, ``boxed`` or None. Raises ValueError for anything else."""
    ground_truth = decoded(ground_truth)
    form = (ground_truth.get("form") if hasattr(ground_truth, "get") else None) or None
    if form is not None and form not in FORMS:
        raise ValueError(f"reward_model.ground_truth.form is {form!r}: expected one of {', '.join(FORMS)}")
    return form


def final_answer(text: str, ground_truth) -> str | None:
    """The answer in the text, in the row's form; None when there is none."""
    return extract_boxed(text) if answer_form(ground_truth) == BOXED else extract_answer(text)


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth,
    extra_info=None,
    format_penalty: float = 0.0,
    include_reasoning: bool = False,
) -> dict[str, float]:
    """verl's ``custom_reward_function`` contract.

    score = em - format_penalty * [no answer];  ``em``, ``f1``, ``format_ok`` go to the metrics.
    A row of an environment has its environment's outcome (`env_record.scores`).
    The search agent's record contains the policy's own last turn. ``solution_str`` also contains observations, and an
    answer tag inside a retrieved page must not count. An answer inside a thought counts with ``include_reasoning`` alone.
    """
    record = (extra_info or {}).get(ROW_RECORD)
    if record and record.get("environment"):
        return scores(record)
    golds = gold_answers(ground_truth)
    text = (record or {}).get("final_text", solution_str)
    answer = final_answer(text if include_reasoning else without_thoughts(text), ground_truth)
    boxed = answer_form(ground_truth) == BOXED
    em = boxed_match(answer, golds) if boxed else exact_match(answer, golds)
    penalty = 0.0 if answer is not None else float(format_penalty)
    return {
        "score": em - penalty,
        "em": em,
        "f1": em if boxed else token_f1(answer, golds),  # F1 over words makes no sense for a number
        "format_ok": float(answer is not None),
        "format_penalty": penalty,
        "tool_fault": float(bool(record and record.get("tool_fault"))),
    }


LONGEST_NUMBER = 200  # characters; Python refuses to parse much longer numbers

_BOX = re.compile(r"\\boxed\s*\{")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)  # an escaped brace does not count
_UNITS = re.compile(r"\\\$|\\%|\\,|\\!|\$|%")
_DECIMAL = r"[-+]?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d*)?|[-+]?\.\d+"
_NUMBER = re.compile(
    rf"({_DECIMAL})(?:\s*/\s*({_DECIMAL}))?|"
    rf"([-+]?)\\[dt]?frac\s*\{{\s*({_DECIMAL})\s*\}}\s*\{{\s*({_DECIMAL})\s*\}}",
    re.ASCII,
)


def extract_boxed(text: str) -> str | None:
    r"""The content of the last complete ``\boxed{...}``, braces balanced, stripped; None when there is none.

    An empty box only mentions the form, as an empty tag does. One pass over the braces, so that the time is linear in the
    text's length.
    """
    found, opened = [], []
    boxes = {box.end() for box in _BOX.finditer(text)}
    for brace in _BRACE.finditer(text):
        if brace[0] == "{":
            opened.append(brace.end())
        elif brace[0] == "}" and opened:
            start = opened.pop()
            if start in boxes:
                found.append((start, brace.start()))
    # Boxes in each other share their text, so that no long one is looked at before it is taken.
    found.sort()
    answers = [box for box in found if box[1] - box[0] > 8 or text[slice(*box)].strip() not in _MENTIONS]
    return text[slice(*(answers or found)[-1])].strip() if found else None


def number(text: str) -> Fraction | None:
    r"""The exact number that ``text`` consists of; None for any other text.

    Integers, decimals, ``a/b`` and ``\frac{a}{b}``, with commas between groups of three digits. ``$``, ``%`` and LaTeX's
    thin spaces are dropped: "50\%" is 50, as in other scorers.
    """
    plain = _UNITS.sub("", text.replace("{,}", ",").replace("\u2212", "-")).strip()
    found = _NUMBER.fullmatch(plain) if len(plain) <= LONGEST_NUMBER else None
    if found is None:
        return None
    whole, divisor, sign, above, below = found.groups()
    numerator, denominator = (
        Fraction(text.replace(",", "").rstrip(".")) for text in (whole or above, divisor or below or "1")
    )
    if not denominator:
        return None
    return numerator / denominator * (-1 if sign == "-" else 1)


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
