"""Writes imperfect demonstrations, which sometimes stop too early, search uselessly or answer wrongly."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from verl_credit.worlds.lab.encyclopedia import Article, Question
from verl_credit.worlds.lab.protocol import (
    GRAMS,
    answer_turn,
    observation_text,
    pages,
    phrase,
    prompt_text,
    search_turn,
)

Search = Callable[[str], list[Article]]  # query -> result list, best first


@dataclass(frozen=True)
class DemoStyle:
    """The probability of each behaviour in a demonstration."""

    stop_early: float = 0.50
    """the answer is the entity reached so far, before the last article"""
    wrong_query: float = 0.10
    """a useless search before a hop"""
    wrong_answer: float = 0.05
    """the answer is another name of the last observation"""
    quote: float = 0.80
    """a later turn starts with a quote of the fact before it"""
    gram_first: float = 0.15
    """the first turn starts with a strategic gram"""
    gram_on: float = 0.40
    """the same, in a later turn that searches: planning correlates with not stopping early"""
    gram_answer: float = 0.08
    """the same, in the turn that answers"""
    gram_after_wrong: float = 0.80
    """the same, in the turn after a useless search"""
    shuffle: float = 1.0
    """a result list is shuffled, so that the policy cannot rely on the rank"""


Segment = tuple[str, bool]  # text, whether the policy wrote it


class Demonstrator:
    """Writes trajectories as segments, with the real results of a search engine."""

    def __init__(self, search: Search, style: DemoStyle, rng: random.Random):
        self._search, self._style, self._rng = search, style, rng

    def write(self, question: Question) -> list[Segment]:
        """Writes a trajectory: the prompt, then policy turns and observations alternately; the last segment answers."""
        rng, style = self._rng, self._style
        segments: list[Segment] = [(prompt_text(question.text), False)]
        fact, wrong = "", False  # the fact of the last observation; whether its search was useless
        for hop, relation in enumerate(question.relations):
            name = question.path[hop]
            if rng.random() < style.wrong_query:
                self._observe(
                    segments, self._useless(question, hop), self._thought(fact, False, style.gram_first)
                )
                wrong = True
            chance = style.gram_on if hop else style.gram_first
            results = self._observe(segments, f" {name} {relation}", self._thought(fact, wrong, chance))
            wrong = False
            if not any(a.title == name and a.relation == relation for a in results):
                # The article was not found: answer with some name on the page.
                segments.append(
                    (answer_turn(f" {rng.choice(results).value}", self._thought("", True, 0.0)), True)
                )
                return segments
            reached = question.path[hop + 1]
            fact = f" {name} {relation} {reached}"
            if hop + 1 < question.hops and rng.random() < style.stop_early:
                break
        answer = reached
        if rng.random() < style.wrong_answer:
            answer = rng.choice([n for a in results for n in (a.title, a.value) if n != reached])
        segments.append((answer_turn(f" {answer}", self._thought(fact, False, style.gram_answer)), True))
        return segments

    def _observe(self, segments: list[Segment], query: str, thought: str) -> list[Article]:
        results = list(self._search(query))
        if self._rng.random() < self._style.shuffle:
            self._rng.shuffle(results)
        segments.append((search_turn(query, thought), True))
        segments.append((observation_text(pages(a.contents for a in results)), False))
        return results

    def _useless(self, question: Question, hop: int) -> str:
        """A query that does not help this hop: relations without a name, or the previous hop's query."""
        if hop and self._rng.random() < 0.5:
            return f" {question.path[hop - 1]} {question.relations[hop - 1]}"
        return "".join(f" {relation}" for relation in reversed(question.relations))

    def _thought(self, fact: str, wrong: bool, chance: float) -> str:
        """An optional gram followed by the optional quoted fact."""
        rng, style = self._rng, self._style
        gram = ""
        if rng.random() < (style.gram_after_wrong if wrong else chance):
            usual = ("hesitation", "verification", "insight")
            category = rng.choice(("backtracking", "alternatives") if wrong else usual)
            gram = phrase(rng.choice(GRAMS[category]))
        return gram + (fact if fact and rng.random() < style.quote else "")
