"""The common form of a question, and the reasons for which a record is dropped."""

from __future__ import annotations

from dataclasses import dataclass, field

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
    """`prepare` wrote nothing; the message names what is wrong and what would be right."""


class Rejected(Exception):
    """A record is dropped for one of the reasons above."""

    def __init__(self, reason: str, detail: str = ""):
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason, self.detail = reason, detail


@dataclass
class Record:
    """A question with all its gold answers, the canonical one first.

    ``derived`` are a release's normalised copies of answers, kept only when they match something that ``answers`` do
    not. ``paragraphs`` are the question's (title, text) pairs.
    """

    question: str
    answers: list
    id: str = ""
    derived: list = field(default_factory=list)
    paragraphs: list[tuple[str, str]] = field(default_factory=list)
    supporting: list[str] = field(default_factory=list)
    """Titles of the paragraphs that the answer rests on, where the release names them."""
    origin: str = ""
    """The source's split: train, val or test."""


def is_text(value: str) -> bool:
    """Whether the string can be encoded as UTF-8; a lone surrogate cannot."""
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True
