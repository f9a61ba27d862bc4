"""Values by trying again (VinePPO, at turns): from some of a step's states the policy goes on several times more.

V(s) is the mean outcome of the continuations from s, which are no rows of the step. The host makes them. The first state of
a prompt is never chosen: the rollouts of its group are continuations from it.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from verl_credit.config.keys import reads
from verl_credit.config.settings import CreditSettings
from verl_credit.lazy import torch
from verl_credit.turns.book import TurnBatch
from verl_credit.turns.requests import turn_spans

State = tuple[str, tuple[int, ...]]
"""The name of the prompt and all tokens before a turn. Rows that have both in common share the state."""


@dataclass(frozen=True)
class Continued:
    """The continuations of a step: outcomes of those that count, the policy's tokens in them, and the number of those that
    do not count, because a tool failed or answered otherwise on the way to the state, or the rollout raised."""

    outcomes: Mapping[State, Sequence[float]]
    tokens: int
    seconds: float
    left_out: int = 0

    def measured(self, turns: TurnBatch, prompts: Sequence[str]) -> torch.Tensor:
        """measured_B_K1, in float64; NaN where a state has no continuation. ``prompts``: the name of each row's."""
        shape = len(prompts), max(1, int(turns.n_turns_B.max()))
        measured_B_K1 = torch.full(shape, torch.nan, dtype=torch.float64)
        for state, places in states_of(turns, prompts).items():
            if outcomes := self.outcomes.get(state):
                measured_B_K1[tuple(zip(*places, strict=True))] = sum(outcomes) / len(outcomes)
        return measured_B_K1

    def metrics(self) -> dict[str, float]:
        made = [len(of_state) for of_state in self.outcomes.values()]
        found = {"states": sum(map(bool, made)), "count": sum(made), "tokens": self.tokens}
        found |= {"left_out": self.left_out, "seconds": self.seconds}
        return {f"credit/continuations/{name}": float(value) for name, value in found.items()}


def continues_at(settings: CreditSettings, step: int) -> bool:
    """Whether the step (from 1) makes continuations."""
    return reads.continued(settings) and (step - 1) % settings.algorithm.turn_continuations.every == 0


def states_of(turns: TurnBatch, prompts: Sequence[str]) -> dict[State, list[tuple[int, int]]]:
    """The states before every turn but the first, and the (row, turn) pairs that share each."""
    found: dict[State, list[tuple[int, int]]] = {}
    for row in turns.valid_rows:
        for turn, (first, _) in enumerate(turn_spans(turns.turn_ids_B_T[row])):
            if turn:
                ids = (*turns.prompt_ids[row], *turns.response_ids[row][:first])
                found.setdefault((prompts[row], ids), []).append((row, turn))
    return found


def chosen_states(
    turns: TurnBatch,
    prompts: Sequence[str],
    settings: CreditSettings,
    name: str,
    log_prob_B_T: torch.Tensor | None = None,
) -> dict[State, tuple[int, int]]:
    """The states to go on from, with a (row, turn) of each. The order of the rows does not decide.

    ``name``: random choices follow from it. ``log_prob_B_T``: for `choose=uncertainty`. The tokens that are read are of the
    turn before the state: a choice by the turn after it would let the value follow the turn that it judges.
    """
    plan, places = settings.algorithm.turn_continuations, states_of(turns, prompts)
    order = sorted(places)
    if plan.choose == "random":
        random.Random(name).shuffle(order)
    else:

        def mean(row: int, turn: int) -> float:
            own_T = turns.turn_ids_B_T[row] == turn - 1
            return float(log_prob_B_T[row][own_T].double().mean())

        order.sort(key=lambda state: min(mean(*place) for place in places[state]))  # they differ by rounding
    return {state: places[state][0] for state in order[: plan.states]}
