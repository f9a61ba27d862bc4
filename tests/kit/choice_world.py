"""A world without a model whose values are known exactly: a policy given by a table, and a tool that counts good searches.

A turn is a token and END. GOOD and BAD search, and the tool says which; ANSWER and SURE end the trajectory, and so does
the last of ``TURNS`` turns whatever it is. ANSWER is right behind two good searches, SURE behind one.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import torch

from verl_credit.study.fidelity.true_values import Value, states_of
from verl_credit.worlds.rollouts.protocol import State, Step
from verl_credit.worlds.rollouts.sampler import TurnSampler, digest

GOOD, BAD, ANSWER, SURE, END, SAID_GOOD, SAID_BAD, PROMPT = range(8)
TURNS = 4


def chances(question: int, good: int, turn: int) -> list[float]:
    """Of GOOD, BAD, ANSWER, SURE."""
    gives_up = 0.1 + 0.15 * turn + 0.05 * (question % 5)
    finds = (1 - gives_up) * (0.75 - 0.2 * good)
    return [finds, 1 - gives_up - finds, 0.6 * gives_up, 0.4 * gives_up]


def found(ids) -> tuple[int, int, int]:
    """(question, good searches, turn) of a context."""
    good, bad = ids.count(SAID_GOOD), ids.count(SAID_BAD)
    return ids[0] - PROMPT, good, good + bad


def is_right(good: int, last: int) -> bool:
    return (last == ANSWER and good >= 2) or (last == SURE and good >= 1)


@cache
def exact_value(question: int, good: int, turn: int) -> float:
    """V of the state after ``turn`` searches, ``good`` of them good."""
    g, b, a, s = chances(question, good, turn)
    ends = a * is_right(good, ANSWER) + s * is_right(good, SURE)
    if turn == TURNS - 1:
        return ends
    return ends + g * exact_value(question, good + 1, turn + 1) + b * exact_value(question, good, turn + 1)


def drawn_values(groups, continuations: int, seed: int = 0) -> dict[str, Value]:
    """As continuations would come out: each is right with the exact value of its context."""
    drawn, values = np.random.default_rng(seed), {}
    for state in states_of(groups):
        right = drawn.random(continuations) < exact_value(*found(state.ids))
        values[digest(state.ids)] = Value(digest(state.ids), "".join("01"[int(one)] for one in right))
    return values


class ChoiceDecoder:
    """A decoder of `rollouts.sampler.TurnSampler` for that policy; counts the rows that it was asked for."""

    def __init__(self, questions: int):
        self._questions, self.rows = questions, 0

    def start(self, contexts, most_new_tokens):
        self._texts = [tuple(context) for context in contexts]
        return self._log_probs([False] * len(contexts))

    def extend(self, parent_R, token_R):
        self._texts = [(*self._texts[p], t) for p, t in zip(parent_R.tolist(), token_R.tolist(), strict=True)]
        return self._log_probs([True] * len(self._texts))

    def _log_probs(self, chosen):
        self.rows += len(chosen)
        prob_R_V = torch.zeros(len(chosen), PROMPT + self._questions, dtype=torch.float64)
        for row, (ids, has) in enumerate(zip(self._texts, chosen, strict=True)):
            if has:
                prob_R_V[row, END] = 1.0
            else:
                prob_R_V[row, :4] = torch.tensor(chances(*found(ids)))
        return prob_R_V.log()


class ChoiceProtocol:
    """Stands for `fidelity.protocol.Protocol`."""

    def budget(self, state):
        return 2

    def steps(self, written):
        steps = []
        for state, ids in written:
            _, good, turn = found(state.ids)
            if ids[0] in (GOOD, BAD) and turn < TURNS - 1:
                said = SAID_GOOD if ids[0] == GOOD else SAID_BAD
                after = State(state.question, 1, (*state.ids, *ids, said), state.turn + 1)
                steps.append(Step(state, ids, after, None))
            else:
                steps.append(Step(state, ids, None, float(is_right(good, ids[0]))))
        return steps


def world(questions: int, **options):
    """(sampler, protocol, the state before each question's first turn)."""
    sampler = TurnSampler(ChoiceDecoder(questions), [END], **options)
    return sampler, ChoiceProtocol(), [State(q, 1, (PROMPT + q,)) for q in range(questions)]
