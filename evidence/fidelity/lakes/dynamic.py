"""V by dynamic programming, where the policy's context is the state.

    V(c, 0) = 0          V(c, m) = sum_a pi(a | c, m) sum_c' P(c' | c, a) (r + V(c', m - 1))

c: cell, m: moves left; V behind a landing that ends is 0. pi(a | c, m) is the probability of the text of move a, token by
token, by the decoder that the sampler draws from. All other texts end with 0. Float64, and nothing is sampled.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from lakes.lakes import DIRECTIONS, Lake
from lakes.world import GridWorld
from verl_credit.worlds.rollouts.sampler import Decoder, Ids, digest


@dataclass(frozen=True)
class ExactValue:
    """Read as `fidelity.values.Value`, and without noise."""

    context: str
    value: float
    variance: float = 0.0

    @property
    def halves(self) -> tuple[float, float]:
        return self.value, self.value


def state_values(world: GridWorld, decoder: Decoder) -> dict[str, ExactValue]:
    """V of an episode that begins with any cell and any number of moves gone, by the digest of its prompt.

    With the context ``state`` these are all contexts. With ``history`` they are those of a policy that forgets: from any
    place on it sees what it would see if the episode had begun there.
    """
    found = {}
    for number, lake in enumerate(world.lakes):
        places = [world.start(number, cell, turn) for turn in range(world.horizon) for cell in lake.ice]
        prob_N_A = text_probabilities(decoder, [place.ids for place in places], world.calls)
        chosen = dict(zip([(place.cell, place.turn) for place in places], prob_N_A.tolist(), strict=True))
        value = backward(lake, world.horizon, chosen)
        for place in places:
            name = digest(place.ids)
            found[name] = ExactValue(name, value[place.cell, place.turn])
    return found


def backward(lake: Lake, horizon: int, chosen: dict[tuple[int, int], Sequence[float]]) -> dict:
    """V by (cell, moves made); ``chosen[cell, moves made]``: the probability of each move."""
    value: dict[tuple[int, int], float] = {}
    for turn in reversed(range(horizon)):
        for cell in lake.ice:
            value[cell, turn] = sum(
                chosen[cell, turn][move]
                * landing.probability
                * (landing.reward if landing.ends else value.get((landing.cell, turn + 1), 0.0))
                for move in range(len(DIRECTIONS))
                for landing in lake.landings[cell, move]
            )
    return value


def text_probabilities(
    decoder: Decoder, contexts: Sequence[Ids], texts: Sequence[Ids], at_once: int = 128
) -> torch.Tensor:
    """[contexts, texts]: P(text | context) = prod_t pi(token_t | context, tokens before t), float64."""
    parts = []
    for begin in range(0, len(contexts), at_once):
        some = contexts[begin : begin + at_once]
        rows = torch.arange(len(some))
        columns = []
        for text in texts:
            log_prob_R_V = decoder.start(some, len(text))
            log_prob_R = log_prob_R_V[:, text[0]]
            for last, token in pairwise(text):
                log_prob_R_V = decoder.extend(rows, torch.full_like(rows, last))
                log_prob_R = log_prob_R + log_prob_R_V[:, token]
            columns.append(log_prob_R.exp())
        parts.append(torch.stack(columns, dim=1))
    return torch.cat(parts)
