"""The common form of a question, its check before it becomes a row, and the reasons for which a record is dropped."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from verl_credit.turns.rollout.reward.qa import BOXED, exact_match, extract_answer, normalize_answer, number

# Why a record is dropped; the report has a line for each.
UNREADABLE = "unreadable"
UNKNOWN_FORM = "not in a known form"
OTHER_SET = "of another data set"
NO_QUESTION = "no question"
NO_ANSWER = "no answer"
BLANK_ANSWER = "answers are blank"
UNANSWERABLE = "marked as unanswerable"
ODD_ANSWER = "answer not in a known form"
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
    answers: list[str]
    id: str = ""
    derived: list[str] = field(default_factory=list)
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

    ``left_out`` counts the answers that are left out, by reason: the reward could never match an answer with an answer tag,
    and every gold answer costs a scored branch per turn. Numbers stand without commas, as the prompt asks for them.
    """
    if not is_text(record.question):
        raise Rejected(NOT_TEXT, f"question {record.question!r:.60}")
    given, derived = ([text.strip() for text in texts] for texts in (record.answers, record.derived))
    kept, seen, known = [], set(), set()
    for place, answer in enumerate([*given, *([] if form == BOXED else derived)]):
        bare = answer.replace(",", "") if answer and form == BOXED else answer
        if not answer:
            left_out[BLANK] += 1
        elif form == BOXED and number(answer) is None:
            left_out[NO_NUMBER] += 1
        elif bare in seen:
            left_out[REPEATED] += 1
        elif form != BOXED and not (is_text(answer) and _scores(answer)):
            left_out[UNMATCHABLE] += 1
        else:
            seen.add(bare)
            if place >= len(given) and normalize_answer(bare) in known:
                left_out[ADDS_NOTHING] += 1
                continue
            known.add(normalize_answer(bare))
            kept.append(bare)
    if kept:
        record.answers = kept
        return record
    if not given:
        raise Rejected(NO_ANSWER)
    reason = BLANK_ANSWER if not any(given) else NO_NUMBER if form == BOXED else UNMATCHABLE
    raise Rejected(reason, repr(given)[:80])


def _scores(answer: str) -> bool:
    """Does the reward accept a trajectory that gives exactly this answer?"""
    return exact_match(extract_answer(f"<answer>{answer}</answer>"), [answer]) == 1.0
