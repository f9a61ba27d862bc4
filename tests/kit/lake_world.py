"""Lakes (evidence/fidelity/lakes) without a model: a policy given by a table, as `rollouts.sampler.Decoder`."""

from __future__ import annotations

from functools import cache

import torch

from lakes import text
from lakes.lakes import make_lakes
from lakes.world import GridWorld
from verl_credit.worlds.rollouts.sampler import TurnSampler

LAKES, HORIZON = 2, 5


class TableDecoder:
    """It reads the lake's name in the prompt and the last place and count that it was told, in any context.

    Its moves are the calls of the world; with ``STOPS`` it gives up. ``memory``: beyond the table, it gives up with that
    probability more once it has moved down, which it can see in its history alone.
    """

    STOPS = 0.1

    def __init__(self, world: GridWorld, tokenizer, memory: float = 0.0):
        self._tokenizer, self._calls, self._memory = tokenizer, world.calls, memory
        self._stop = tuple(tokenizer.encode(text.STOP, add_special_tokens=False))
        self._size = len(tokenizer)
        self.chosen = cache(self._chosen)

    def _chosen(self, context) -> dict[tuple[int, ...], float]:
        """The probability of each text."""
        shown = self._tokenizer.decode(context)
        number = int(shown.split("lake ")[1][0])
        row, column, left = (int(shown.rsplit(key, 1)[1][0]) for key in ("row ", "column ", "left: "))
        weights = [(1, 5, 5, 1)[move] + (number * row + 3 * column + left * move) % 4 for move in range(4)]
        stops = self.STOPS + (self._memory if text.call(1) in shown else 0.0)
        found = {call: (1 - stops) * w / sum(weights) for call, w in zip(self._calls, weights, strict=True)}
        return found | {self._stop: stops}

    def start(self, contexts, most_new_tokens):
        self._rows = [(self.chosen(tuple(context)), ()) for context in contexts]
        return self._log_probs()

    def extend(self, parent_R, token_R):
        old = [self._rows[parent] for parent in parent_R.tolist()]
        self._rows = [
            (table, (*ids, token)) for (table, ids), token in zip(old, token_R.tolist(), strict=True)
        ]
        return self._log_probs()

    def _log_probs(self):
        prob_R_V = torch.zeros(len(self._rows), self._size, dtype=torch.float64)
        for row, (table, ids) in enumerate(self._rows):
            for whole, probability in table.items():
                if whole[: len(ids)] == ids and len(whole) > len(ids):
                    prob_R_V[row, whole[len(ids)]] += probability
        return (prob_R_V / prob_R_V.sum(dim=1, keepdim=True)).log()


def lake_world(
    context: str, slippery: bool, memory: float = 0.0
) -> tuple[GridWorld, TableDecoder, TurnSampler]:
    tokenizer = text.grid_tokenizer(LAKES, HORIZON)
    world = GridWorld(tokenizer, make_lakes(slippery)[:LAKES], context=context, horizon=HORIZON)
    decoder = TableDecoder(world, tokenizer, memory)
    return world, decoder, TurnSampler(decoder, [tokenizer.eos_token_id])
