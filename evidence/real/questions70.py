"""The 70 HotpotQA questions with their ten paragraphs, and what each paragraph is to its question."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from verl_credit.data.readers import read_hotpotqa
from verl_credit.reward.qa import normalize_answer
from verl_credit.search.pages import Page

ONE, BOTH, YES_NO = "one answer page", "two answer pages", "yes or no"
"""Kinds of questions: one of the two supporting paragraphs has the answer's text, both have it, the answer is yes or no."""


@dataclass(frozen=True)
class Question:
    text: str
    answer: str
    type: str
    """HotpotQA's own label: bridge or comparison."""
    supporting: tuple[Page, ...]
    distractors: tuple[Page, ...]

    @property
    def kind(self) -> str:
        """Raises ValueError where no supporting paragraph has the answer."""
        if self.answer in ("yes", "no"):
            return YES_NO
        holders = sum(map(self.has_answer, self.supporting))
        if not 1 <= holders <= 2:
            raise ValueError(
                f"{self.text!r}: {holders} supporting paragraphs have the answer {self.answer!r}"
            )
        return (ONE, BOTH)[holders - 1]

    @property
    def answer_page_and_other(self) -> tuple[Page, Page]:
        """The supporting paragraphs, one with the answer first; in their own order if both or neither has it."""
        first, second = self.supporting
        return (first, second) if self.has_answer(first) or not self.has_answer(second) else (second, first)

    @property
    def answer_in_question(self) -> bool:
        return self._stands_in(self.text)

    def has_answer(self, page: Page) -> bool:
        """Whether the answer's normalised words stand in the paragraph, title included."""
        return self._stands_in(f"{page.title} {page.text}")

    def _stands_in(self, text: str) -> bool:
        return f" {normalize_answer(self.answer)} " in f" {normalize_answer(text)} "


def read_questions(file: Path) -> list[Question]:
    """Pages have the contents that `verl-credit prepare hotpotqa` writes into the corpus."""
    found = []
    for raw in json.loads(file.read_text(encoding="utf-8")):
        record, titles = read_hotpotqa(raw), set(raw["supporting_facts"]["title"])
        pages = [(title in titles, Page("", title, text.strip(), 0.0)) for title, text in record.paragraphs]
        supporting = tuple(page for is_one, page in pages if is_one)
        if len(supporting) != 2:
            raise ValueError(
                f"{file}: {len(supporting)} supporting paragraphs for {record.question!r}; expected 2"
            )
        others = tuple(page for is_one, page in pages if not is_one)
        found.append(Question(record.question, record.answers[0], raw["type"], supporting, others))
    return found
