"""The limits that follow from the hops of a lab's questions: for the build, the recipe and the checks, without torch."""

from __future__ import annotations

from dataclasses import dataclass

MOST_HOPS = 6
"""The longest questions for which a supervised start ends inside the gate."""
TOP_K = 3
MAX_NEW_TOKENS = 40
OBSERVATION = 54
"""Tokens of an observation of TOP_K pages, at most."""
SEARCHES_OF_MIX = 4


@dataclass(frozen=True)
class Limits:
    """Lengths in tokens of the lab's tokenizer, by their keys."""

    max_searches: int
    max_prompt_length: int
    max_response_length: int


def limits_of(hops: int | None) -> Limits:
    """The limits of questions of ``hops`` hops, with two searches more than they need; None: the mix of one to three hops.

    A response has at most max_searches turns with an observation, and the turn that answers.
    """
    searches = SEARCHES_OF_MIX if hops is None else hops + 2
    response = searches * (MAX_NEW_TOKENS + OBSERVATION) + MAX_NEW_TOKENS
    return Limits(max_searches=searches, max_prompt_length=48, max_response_length=response)
