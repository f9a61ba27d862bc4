"""Next-token distributions of a growing set of texts behind given contexts: what the trie sampler asks of a policy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from transformers import PreTrainedModel

from verl_credit.policy.generation.decoding import GrowingCache, grouped_decode_attention


class Decoder(Protocol):
    """Rows of equal depth. A table of probabilities can stand for a model."""

    def start(self, contexts: Sequence[Sequence[int]], most_new_tokens: int) -> torch.Tensor:
        """log_prob_R_V of the token behind each context."""

    def extend(self, parent_R: torch.Tensor, token_R: torch.Tensor) -> torch.Tensor:
        """New rows, each an old row with one more token: log_prob_R_V of the next. Old rows are forgotten."""


class ModelDecoder:
    """A transformers causal language model with its key-value cache; contexts are padded on the left.

    The distribution is the one at temperature 1 over the whole vocabulary, float64 [R, V], as the rollout server draws from.
    """

    def __init__(self, model: PreTrainedModel, pad_token_id: int):
        self._model, self._pad = model, pad_token_id

    @torch.inference_mode()
    def start(self, contexts: Sequence[Sequence[int]], most_new_tokens: int) -> torch.Tensor:
        width = max(map(len, contexts))
        ids_R_P = torch.full((len(contexts), width), self._pad, dtype=torch.long)
        visible_R_L = torch.ones(len(contexts), width + most_new_tokens, dtype=torch.bool)
        for row, context in enumerate(contexts):
            ids_R_P[row, width - len(context) :] = torch.tensor(context)
            visible_R_L[row, : width - len(context)] = False
        self._visible_R_L, self._depth, self._width = visible_R_L, 0, width
        self._length_R = visible_R_L[:, :width].sum(dim=1)
        self._cache = GrowingCache(self._model.config.num_hidden_layers)
        positions_R_P = (visible_R_L[:, :width].long().cumsum(dim=1) - 1).clamp(min=0)
        padded = not bool(visible_R_L.all())
        return self._forward(ids_R_P, positions_R_P, visible_R_L[:, :width] if padded else None)

    @torch.inference_mode()
    def extend(self, parent_R: torch.Tensor, token_R: torch.Tensor) -> torch.Tensor:
        rows = len(self._length_R)
        if len(parent_R) != rows or not torch.equal(parent_R, torch.arange(rows)):
            self._cache.select_rows(parent_R)
            self._visible_R_L, self._length_R = self._visible_R_L[parent_R], self._length_R[parent_R]
        mask = self._visible_R_L[:, None, None, : self._width + self._depth + 1]
        positions_R_1 = (self._length_R + self._depth)[:, None]
        self._depth += 1
        return self._forward(token_R[:, None], positions_R_1, mask)

    def _forward(self, ids: torch.Tensor, positions: torch.Tensor, mask) -> torch.Tensor:
        with grouped_decode_attention(self._model):
            output = self._model(
                input_ids=ids,
                position_ids=positions,
                attention_mask=mask,
                past_key_values=self._cache,
                use_cache=True,
                logits_to_keep=1,
            )
        return output.logits[:, -1].double().log_softmax(dim=-1)
