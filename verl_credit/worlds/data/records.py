"""The common form of a question, its check before it becomes a row, and the reasons for which a record is dropped."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from verl_credit.turns.reward.qa import BOXED, exact_match, extract_answer, normalize_answer, number

# Why a record is dropped; the report has a line for each.
UNREADABLE = "unreadable"
UNKNOWN_FORM = "not in a known form"
OTHER_SET = "of another data set"
NO_QUESTION = "no question"
NO_ANSWER = "no answer"
BLANK_ANSWER = "answers are blank"
UNANSWERABLE = "marked as unanswerable"
UNMATCHABLE = "no answer that the reward can match"
NO_NUMBER = "answer is not a number"
NOT_TEXT = "not valid text"
DUPLICATE = "repeated"


class PrepareError(Exception):
    """`prepare` wrote nothing; the message names what is wrong and what is accepted."""


class Rejected(Exception):
    """A record is dropped for one of the reasons above."""

    def __init__(self, reason: str, detail: str = ""):
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason, self.detail = reason, detail


@dataclass
class Record:
    """A question with all its gold answers, the canonical one first.

    ``derived`` are a release's normalised copies of answers, kept only when no entry of ``answers`` matches them.
    ``paragraphs`` are the question's (title, text) pairs.
    """

    question: str
    answers: list
    id: str = ""
    derived: list = field(default_factory=list)
    paragraphs: list[tuple[str, str]] = field(default_factory=list)
    supporting: list[str] = field(default_factory=list)
    """Titles of the paragraphs that support the answer, where the release names them."""
    origin: str = ""
    """The source's split: train, val or test."""


def is_text(value: str) -> bool:
    """Can the string be encoded as UTF-8? A lone surrogate cannot."""
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


BLANK, REPEATED, ADDS_NOTHING = "blank", "repeated", "normalised copy"


def clean(record: Record, form: str, left_out: Counter) -> Record:
    """The record with its gold answers as stripped text without repetitions. Raises Rejected.

    ``left_out`` counts the answers that are left out, by reason. An answer that contains "</answer>" is left out:
    the reward could never match it, and would punish the right answer.
    """
    if not is_text(record.question):
        raise Rejected(NOT_TEXT, f"question {record.question!r:.60}")
    given = [answer for answer in map(_as_text, record.answers) if answer is not None]
    if form == BOXED:
        answers = _numbers(given, left_out)
    else:
        answers = _matchable(given, [], left_out)
        answers += _new_ones(_matchable(map(_as_text, record.derived), answers, left_out), answers, left_out)
    if answers:
        record.answers = answers
        return record
    if not given:
        raise Rejected(NO_ANSWER)
    reason = BLANK_ANSWER if not any(given) else NO_NUMBER if form == BOXED else UNMATCHABLE
    raise Rejected(reason, repr(given)[:80])


def _as_text(answer) -> str | None:
    if answer is None or isinstance(answer, (bool, list, dict)):
        return None
    return str(answer).strip()


def _matchable(answers: Iterable[str | None], before: list[str], left_out: Counter) -> list[str]:
    kept: list[str] = []
    for answer in answers:
        if not answer:
            left_out[BLANK] += 1
        elif answer in kept or answer in before:
            left_out[REPEATED] += 1
        elif not is_text(answer) or not _scores(answer):
            left_out[UNMATCHABLE] += 1
        else:
            kept.append(answer)
    return kept


def _scores(answer: str) -> bool:
    """Does the reward accept a trajectory that gives exactly this answer?"""
    return exact_match(extract_answer(f"<answer>{answer}</answer>"), [answer]) == 1.0


def _new_ones(derived: list[str], answers: list[str], left_out: Counter) -> list[str]:
    """The derived answers that no earlier answer matches: every gold answer costs a scored branch per turn."""
    known = {normalize_answer(answer) for answer in answers}
    kept = []
    for answer in derived:
        if normalize_answer(answer) in known:
            left_out[ADDS_NOTHING] += 1
        else:
            known.add(normalize_answer(answer))
            kept.append(answer)
    return kept


def _numbers(given: list[str], left_out: Counter) -> list[str]:
    """The numbers without commas, as the prompt asks the policy to write them."""
    kept: list[str] = []
    for answer in given:
        if not answer:
            left_out[BLANK] += 1
        elif number(answer) is None:
            left_out[NO_NUMBER] += 1
        elif (bare := answer.replace(",", "")) in kept:
            left_out[REPEATED] += 1
        else:
            kept.append(bare)
    return kept
