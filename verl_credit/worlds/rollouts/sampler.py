"""Independent samples of one turn, at the price of the distinct texts among them.

All samples ("particles") behind a context walk one trie: a node is a distinct text so far and has its next-token
distribution once, whatever the number of particles on it. Each particle draws with uniform numbers of its own, so that

    P(text) = prod_t pi(token_t | context, tokens before t)      for every particle, independently of the others.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch

from verl_credit.policy.generation.sampling import inverse_cdf
from verl_credit.worlds.rollouts.decoder import Decoder

Ids = tuple[int, ...]


@dataclass(frozen=True)
class Ask:
    """``uniform_P_N``: a row per particle and a number in [0, 1) per token; N is the turn's budget of tokens."""

    context: Ids
    uniform_P_N: np.ndarray


def digest(ids: Sequence[int]) -> str:
    """A context's name: a hash of its token ids, equal on every machine."""
    return hashlib.blake2b(array("q", ids).tobytes(), digest_size=12).hexdigest()


def uniforms(*parts: object, particles: int, tokens: int) -> np.ndarray:
    """[particles, tokens] numbers that follow from the parts alone: not from batches, nor from what was drawn before."""
    seed = hashlib.blake2b(repr(parts).encode(), digest_size=16).digest()
    generator = np.random.Generator(np.random.PCG64(int.from_bytes(seed, "big")))
    return generator.random((particles, tokens))


class TurnSampler:
    """Samples turns of a policy at temperature 1; greedy ones with ``greedy``.

    ``forwards`` and ``drawn`` count nodes of the trie (tokens that the model computed a distribution for) and sampled
    tokens: their ratio is what the trie saves.
    """

    def __init__(
        self,
        decoder: Decoder,
        stop_ids: Sequence[int],
        *,
        drawable: int | None = None,
        greedy: bool = False,
        contexts_at_once: int = 128,
    ):
        self._decoder, self._stop, self._greedy = decoder, np.array(sorted(stop_ids)), greedy
        self._drawable, self._at_once = drawable, contexts_at_once
        self.forwards = self.drawn = self.contexts = 0

    def sample(self, asks: Sequence[Ask]) -> list[list[Ids]]:
        """The text of every particle of every ask; it ends with a stop token, or after its budget of tokens."""
        texts: list[list[Ids]] = [[] for _ in asks]
        by_length = sorted(range(len(asks)), key=lambda i: (len(asks[i].context), asks[i].context))
        for begin in range(0, len(by_length), self._at_once):
            chosen = by_length[begin : begin + self._at_once]
            for i, found in zip(chosen, self._batch([asks[i] for i in chosen]), strict=True):
                texts[i] = found
        return texts

    def _batch(self, asks: list[Ask]) -> list[list[Ids]]:
        sizes = [len(ask.uniform_P_N) for ask in asks]
        budget_P = np.repeat([ask.uniform_P_N.shape[1] for ask in asks], sizes)
        uniform_P_N = np.zeros((sum(sizes), int(budget_P.max())))
        first = 0
        for ask, size in zip(asks, sizes, strict=True):
            uniform_P_N[first : first + size, : ask.uniform_P_N.shape[1]] = ask.uniform_P_N
            first += size
        token_P_N = np.full(uniform_P_N.shape, -1)
        log_prob_R_V = self._decoder.start([ask.context for ask in asks], uniform_P_N.shape[1])
        self.contexts += len(asks)
        alive, row = np.arange(sum(sizes)), np.repeat(np.arange(len(asks)), sizes)
        for step in range(uniform_P_N.shape[1]):
            self.forwards += len(log_prob_R_V)
            self.drawn += len(alive)
            token = self._draw(log_prob_R_V, row, uniform_P_N[alive, step])
            token_P_N[alive, step] = token
            goes_on = ~np.isin(token, self._stop) & (step + 1 < budget_P[alive])
            alive, row, token = alive[goes_on], row[goes_on], token[goes_on]
            if not len(alive):
                break
            pairs, row = np.unique(np.stack([row, token]), axis=1, return_inverse=True)
            row = row.reshape(-1)
            log_prob_R_V = self._decoder.extend(torch.from_numpy(pairs[0]), torch.from_numpy(pairs[1]))
        written = [tuple(ids[ids >= 0].tolist()) for ids in token_P_N]
        ends = np.cumsum([0, *sizes])
        return [written[a:b] for a, b in pairwise(ends)]

    def _draw(self, log_prob_R_V: torch.Tensor, row: np.ndarray, uniform: np.ndarray) -> np.ndarray:
        log_prob_R_V = log_prob_R_V[:, : self._drawable]
        if self._greedy:
            return log_prob_R_V.argmax(dim=-1).numpy()[row]
        # Particles of a row stand side by side: a column each, as many as the fullest row has.
        order = np.argsort(row, kind="stable")
        counts = np.bincount(row, minlength=len(log_prob_R_V))
        column = np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)
        uniform_R_S = np.zeros((len(log_prob_R_V), counts.max()))
        uniform_R_S[row[order], column] = uniform[order]
        drawn_R_S = inverse_cdf(log_prob_R_V.exp(), torch.from_numpy(uniform_R_S)).numpy()
        token = np.empty_like(row)
        token[order] = drawn_R_S[row[order], column]
        return token
