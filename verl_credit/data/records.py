"""One question as every data set is brought to, and why a record is not one."""

from __future__ import annotations

from dataclasses import dataclass, field

# Why a record is dropped. Every one of these is a line of the report.
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
    """Nothing was written; one line that says what is wrong and what would be right."""


class Rejected(Exception):
    """This record is dropped: one of the reasons above, and the particulars."""

    def __init__(self, reason: str, detail: str = ""):
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason, self.detail = reason, detail


@dataclass
class Record:
    """A question with all its gold answers, the canonical one first.

    ``derived`` are normalised copies that a release brings along: kept only where they match something that
    ``answers`` do not. ``paragraphs`` are (title, text) pairs that came with the question.
    """

    question: str
    answers: list
    id: str = ""
    derived: list = field(default_factory=list)
    paragraphs: list[tuple[str, str]] = field(default_factory=list)
    origin: str = ""
    """The source's split: train, val or test."""


def is_text(value: str) -> bool:
    """Whether it can be written as UTF-8; a lone surrogate cannot."""
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True
