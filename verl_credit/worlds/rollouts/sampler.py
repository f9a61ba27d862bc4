"""Independent samples of one turn, at the cost of the distinct texts among them.

All samples ("particles") after a context walk one trie: a node is a distinct text so far and has its next-token
distribution once, whatever the number of particles on it. Each particle draws with uniform numbers of its own, so that

    P(text) = prod_t pi(token_t | context, tokens before t)      for every particle, independently of the others.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from transformers import PreTrainedModel

from verl_credit.policy.cache import RowCache
from verl_credit.policy.decoding import decoding, require_decodable
from verl_credit.policy.sampling import inverse_cdf
from verl_credit.worlds.rollouts.prefixes import Ids, Prefixes


class ModelDecoder:
    """A transformers causal language model with its key-value cache; contexts are padded on the left.

    ``start`` gives log_prob_R_V of the token after each context. ``extend`` makes new rows, each an old row with one more
    token, and gives log_prob_R_V of the next. The weights must not change meanwhile: what was read is kept.

    The distribution is the one at temperature 1 over the whole vocabulary, float64 [R, V], as the rollout server draws from.
    Raises ValueError for a model whose layers have a recurrent state, which the padding would enter.
    """

    def __init__(self, model: PreTrainedModel, pad_token_id: int):
        require_decodable(model)
        if RowCache(model.config).recurrent:
            kind = model.config.model_type
            raise ValueError(f"model_type={kind}: only models without recurrent layers are sampled")
        self._model, self._pad = model, pad_token_id
        self._prefixes, self._ids_R, self._cache = Prefixes(), [], None

    @torch.inference_mode()
    def start(self, contexts: Sequence[Sequence[int]], most_new_tokens: int) -> torch.Tensor:
        self._keep(range(len(self._ids_R)))
        contexts = [tuple(context) for context in contexts]
        width = max(map(len, contexts))
        self._visible_R_L = torch.ones(len(contexts), width + most_new_tokens, dtype=torch.bool)
        for row, context in enumerate(contexts):
            self._visible_R_L[row, : width - len(context)] = False
        self._ids_R, self._depth, self._width = contexts, 0, width
        self._length_R = self._visible_R_L[:, :width].sum(dim=1)
        nearest = [self._prefixes.nearest(context) for context in contexts]
        halves = [2 * n >= len(context) for context, (_, n) in zip(contexts, nearest, strict=True)]
        parts = [[row for row, read in enumerate(halves) if read is known] for known in (False, True)]
        caches, log_probs = [], []
        for rows in filter(None, parts):
            caches.append(RowCache(self._model.config))
            log_probs.append(self._read(rows, [nearest[row] for row in rows], halves[rows[0]], caches[-1]))
        self._cache = caches[0]
        if len(caches) == 1:
            return log_probs[0]
        joined, order = RowCache(self._model.config), torch.tensor(parts[0] + parts[1]).argsort()
        joined.join(caches)
        joined.reorder_cache(order)
        self._cache = joined
        return torch.cat(log_probs)[order]

    def _read(self, rows, nearest, known: bool, cache: RowCache) -> torch.Tensor:
        """log_prob_r_V after these rows, of whose tokens those of a kept row are not read again where they are ``known``."""
        lengths = [len(self._ids_R[row]) for row in rows]
        width = max(lengths)
        new = max(n - taken for n, (_, taken) in zip(lengths, nearest, strict=True)) if known else width
        if new < width:
            taken = [(ids, max(n - new, 0)) for n, (ids, _) in zip(lengths, nearest, strict=True)]
            self._prefixes.fill(cache, taken, width - new)
        ids_r_N = torch.full((len(rows), new), self._pad, dtype=torch.long)
        for i, row in enumerate(rows):
            own = self._ids_R[row][-new:]
            ids_r_N[i, new - len(own) :] = torch.tensor(own)
        visible_r_L = self._visible_R_L[rows, self._width - width : self._width]
        positions_r_L = (visible_r_L.long().cumsum(dim=1) - 1).clamp(min=0)
        padded = new < width or not bool(visible_r_L.all())
        return self._forward(ids_r_N, positions_r_L[:, -new:], visible_r_L if padded else None, cache)

    @torch.inference_mode()
    def extend(self, parent_R: torch.Tensor, token_R: torch.Tensor) -> torch.Tensor:
        rows = len(self._length_R)
        if len(parent_R) != rows or not torch.equal(parent_R, torch.arange(rows)):
            self._keep(sorted({*range(rows)} - {*parent_R.tolist()}))
            self._cache.reorder_cache(parent_R)
            self._visible_R_L, self._length_R = self._visible_R_L[parent_R], self._length_R[parent_R]
        pairs = zip(parent_R.tolist(), token_R.tolist(), strict=True)
        self._ids_R = [(*self._ids_R[parent], token) for parent, token in pairs]
        mask = self._visible_R_L[:, : self._width + self._depth + 1]
        positions_R_1 = (self._length_R + self._depth)[:, None]
        self._depth += 1
        return self._forward(token_R[:, None], positions_R_1, mask, self._cache)

    def _keep(self, rows: Iterable[int]) -> None:
        """Keeps rows that no longer go on: a context that follows begins like one of them."""
        if self._cache is not None:
            self._prefixes.keep([(row, self._ids_R[row]) for row in rows], self._cache)

    def _forward(self, ids: torch.Tensor, positions: torch.Tensor, mask, cache: RowCache) -> torch.Tensor:
        with decoding(self._model):
            output = self._model(
                input_ids=ids,
                position_ids=positions,
                attention_mask=mask,
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=1,
            )
        return output.logits[:, -1].double().log_softmax(dim=-1)


@dataclass(frozen=True)
class Ask:
    """``uniform_P_N``: a row per particle and a number in [0, 1) per token; N is the turn's budget of tokens."""

    context: Ids
    uniform_P_N: np.ndarray


def digest(ids: Sequence[int]) -> str:
    """A context's name: a hash of its token ids, equal on every machine."""
    return hashlib.blake2b(array("q", ids).tobytes(), digest_size=12).hexdigest()


def uniforms(*parts: object, particles: int, tokens: int) -> np.ndarray:
    """[particles, tokens] numbers that depend only on the parts, not on batches or earlier draws."""
    seed = hashlib.blake2b(repr(parts).encode(), digest_size=16).digest()
    generator = np.random.Generator(np.random.PCG64(int.from_bytes(seed, "big")))
    return generator.random((particles, tokens))


class TurnSampler:
    """Samples turns of a policy at temperature 1, or greedily with ``greedy``."""

    def __init__(
        self,
        decoder: ModelDecoder,
        stop_ids: Sequence[int],
        *,
        drawable: int | None = None,
        greedy: bool = False,
        contexts_at_once: int = 128,
    ):
        self._decoder, self._stop, self._greedy = decoder, np.array(sorted(stop_ids)), greedy
        self._drawable, self._at_once = drawable, contexts_at_once

    def sample(self, asks: Sequence[Ask]) -> list[list[Ids]]:
        """The text of every particle of every ask; it ends with a stop token, or after its budget of tokens."""
        texts: list[list[Ids]] = [[] for _ in asks]
        by_length = sorted(range(len(asks)), key=lambda i: (len(asks[i].context), asks[i].context))
        for begin in range(0, len(by_length), self._at_once):
            chosen = by_length[begin : begin + self._at_once]
            for i, of_ask in zip(chosen, self._batch([asks[i] for i in chosen]), strict=True):
                texts[i] = of_ask
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
        alive, row = np.arange(sum(sizes)), np.repeat(np.arange(len(asks)), sizes)
        for step in range(uniform_P_N.shape[1]):
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
