"""Imperfect demonstrations: search, read, sometimes stop too early, search wrongly or answer wrongly."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from verl_credit.lab.grams import GRAMS, phrase
from verl_credit.lab.protocol import answer_turn, observation_text, pages, prompt_text, search_turn
from verl_credit.lab.questions import Question
from verl_credit.lab.world import Article

Search = Callable[[str], list[Article]]  # query -> result list, best first


@dataclass(frozen=True)
class DemoStyle:
    """How often the demonstrations do what."""

    stop_early: float = 0.50
    """answers with the entity reached, after an article that is not the last one needed"""
    wrong_query: float = 0.10
    """an extra useless search before a hop"""
    wrong_answer: float = 0.05
    """another name of the last observation"""
    quote: float = 0.80
    """a later turn opens by quoting the fact read"""
    gram_first: float = 0.15
    """the first turn opens with a strategic gram"""
    gram_on: float = 0.40
    """the same, in a later turn that searches on: planning goes with not stopping early"""
    gram_answer: float = 0.08
    """the same, in the turn that answers"""
    gram_after_wrong: float = 0.80
    """the same, in the turn after a useless search"""
    shuffle: float = 1.0
    """a result list is put into random order: rank alone must not be trusted"""


Segment = tuple[str, bool]  # text, whether the policy wrote it


class Demonstrator:
    """Writes trajectories as segments, reading what a search engine really returns."""

    def __init__(self, search: Search, style: DemoStyle, rng: random.Random):
        self._search, self._style, self._rng = search, style, rng

    def write(self, question: Question) -> list[Segment]:
        """One trajectory: prompt, then policy turns and observations in turn; the last segment answers."""
        rng, style = self._rng, self._style
        segments: list[Segment] = [(prompt_text(question.text), False)]
        fact, wrong = "", False  # what the last observation taught; whether it was useless
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
                # Not found: give up with some name on the page, as a policy that cannot read it would.
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
        """A query that does not help this hop: relations without a name, or the hop before once more."""
        if hop and self._rng.random() < 0.5:
            return f" {question.path[hop - 1]} {question.relations[hop - 1]}"
        return "".join(f" {relation}" for relation in reversed(question.relations))

    def _thought(self, fact: str, wrong: bool, chance: float) -> str:
        """A gram (or none) and the quoted fact (or none); empty when there is neither."""
        rng, style = self._rng, self._style
        gram = ""
        if rng.random() < (style.gram_after_wrong if wrong else chance):
            usual = ("hesitation", "verification", "insight")
            category = rng.choice(("backtracking", "alternatives") if wrong else usual)
            gram = phrase(rng.choice(GRAMS[category]))
        return gram + (fact if fact and rng.random() < style.quote else "")
