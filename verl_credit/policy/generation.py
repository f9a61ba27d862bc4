"""Batched generation with a transformers causal language model: token ids and their log-probabilities."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Literal

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from verl_credit.policy.cache import RowCache
from verl_credit.policy.decoding import decoding, require_decodable
from verl_credit.policy.families import positions
from verl_credit.policy.sampling import RowSampler, SamplingParams


@dataclass(frozen=True)
class Generation:
    """The result of one request; `token_ids` ends with the stop token when `finish_reason` is "stop"."""

    token_ids: list[int]
    log_probs: list[float]
    finish_reason: Literal["stop", "length"]


class BatchGenerator:
    """Generates for a whole batch at once: a prefill, then one token per row and step.

    The tokens that all prompts share at their start are prefilled once, and so are equal prompts. After the common start,
    prompts are padded on the left, so that every row's next token is in the last column. Where layers have a recurrent
    state, padding would enter it, so prompts of one length are prefilled together, whole, and without padding. When half of
    the rows have ended, the batch is compacted. Weights may change between two calls of `generate`, not during one.

    `log_probs` are float32, of the temperature-scaled distribution *before* top-k and top-p, as a trainer recomputes old
    log-probabilities. Greedy rows report the argmax's log-probability at T=1. Ids from `sampled_vocab_size` on (a model's
    vocabulary is often padded beyond its tokenizer's) are never drawn, which changes no log-probability either.

    `require_decodable` says which models are accepted.
    """

    def __init__(self, model: PreTrainedModel, *, pad_token_id: int, sampled_vocab_size: int | None = None):
        require_decodable(model)
        self.model, self.pad_token_id, self.sampled_vocab_size = model, pad_token_id, sampled_vocab_size
        self.vocabulary = sampled_vocab_size or model.get_input_embeddings().num_embeddings
        self.recurrent = RowCache(model.config).recurrent
        self.positions = positions(model.config)

    @torch.inference_mode()
    def generate(
        self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]
    ) -> list[Generation]:
        """One Generation per prompt, in their order. Raises ValueError as `check` does, and for other counts."""
        for row, (prompt, p) in enumerate(zip(prompts, params, strict=True)):
            self.check(prompt, p, name=f"prompts[{row}]")
        if not prompts:
            return []
        with decoding(self.model):
            return _Batch(self, prompts, params).run()

    def check(self, prompt: Sequence[int], params: SamplingParams, *, name: str = "the prompt") -> None:
        """Raises ValueError for a prompt that is empty, has an id outside the vocabulary, or exceeds the model's positions
        together with its `max_new_tokens`."""
        vocab_size = self.model.get_input_embeddings().num_embeddings
        if len(prompt) == 0:
            raise ValueError(f"{name} is empty: a prompt needs at least one token")
        if min(prompt) < 0 or max(prompt) >= vocab_size:
            raise ValueError(f"{name} holds a token id outside [0, {vocab_size})")
        if self.positions is not None and len(prompt) + params.max_new_tokens > self.positions:
            raise ValueError(
                f"{name}: {len(prompt)} prompt tokens + max_new_tokens={params.max_new_tokens} exceed "
                f"the model's {self.positions} positions"
            )


class _Batch:
    """The rows that still generate; `row_B` maps them to the rows of the results."""

    def __init__(self, generator: BatchGenerator, prompts, params):
        self.model, self.params, self.device = generator.model, params, generator.model.device
        self.row_B = torch.arange(len(prompts), device=self.device)
        self.sampler = RowSampler(params, self.device, generator.sampled_vocab_size)
        steps = self.sampler.uniform_B_N.shape[1]
        self.budget_B = torch.tensor([p.max_new_tokens for p in params], device=self.device)
        stops = [torch.tensor(p.stop_token_ids or (-1,)) for p in params]
        self.stop_B_S = pad_sequence(stops, batch_first=True, padding_value=-1).to(self.device)
        self.done_B = torch.zeros(len(prompts), dtype=torch.bool, device=self.device)
        self.token_R_N = torch.zeros(len(prompts), steps, dtype=torch.long, device=self.device)
        self.log_prob_R_N = torch.zeros(len(prompts), steps, device=self.device)
        self.length_R = torch.zeros(len(prompts), dtype=torch.long, device=self.device)
        self.stopped_R = torch.zeros(len(prompts), dtype=torch.bool, device=self.device)
        self._prefill(prompts, generator, steps)

    def _prefill(self, prompts, generator, steps) -> None:
        unique: dict[tuple[int, ...], int] = {}
        source_B = torch.tensor([unique.setdefault(tuple(prompt), len(unique)) for prompt in prompts])
        source_B = source_B.to(self.device)
        self.width = max(len(prompt) for prompt in unique)
        self.cache = RowCache(self.model.config, self.width + steps)
        common = 0 if generator.recurrent else _common_start(unique)
        # Columns for new tokens are visible from the start; each step uses only the first columns.
        visible_U_L = torch.zeros(len(unique), self.width + steps, dtype=torch.bool)
        visible_U_L[:, :common] = True
        for prompt, row in unique.items():
            visible_U_L[row, self.width - (len(prompt) - common) :] = True
        visible_U_L = visible_U_L.to(self.device)
        if generator.recurrent:
            logits_U_V = self._prefill_by_length(unique)
        else:
            logits_U_V = self._prefill_padded(unique, common, visible_U_L, generator)
        if len(unique) < len(prompts):
            self.cache.reorder_cache(source_B)
        self.logits_B_V = logits_U_V[source_B]
        self.visible_B_L = visible_U_L[source_B]
        self.prompt_length_B = self.visible_B_L[:, : self.width].sum(dim=1)

    def _prefill_padded(self, unique, common, visible_U_L, generator) -> torch.Tensor:
        """The common start once, then the rest of every prompt, with the padding on its left."""
        width = self.width
        ids_U_P = torch.full((len(unique), width), generator.pad_token_id, dtype=torch.long)
        for prompt, row in unique.items():
            ids_U_P[row, width - (len(prompt) - common) :] = torch.tensor(prompt[common:])
        ids_U_P = ids_U_P.to(self.device)
        if common:
            start_1_P = torch.tensor([next(iter(unique))[:common]], device=self.device)
            start_positions_1_P = torch.arange(common, device=self.device)[None]
            self._forward(start_1_P, start_positions_1_P, None)
            self.cache.reorder_cache(torch.zeros(len(unique), dtype=torch.long, device=self.device))
        positions_U_P = (visible_U_L[:, :width].long().cumsum(dim=1) - 1).clamp(min=0)
        padded = len({len(prompt) for prompt in unique}) > 1
        mask = visible_U_L[:, :width] if padded else None
        return self._forward(ids_U_P[:, common:], positions_U_P[:, common:], mask)

    def _prefill_by_length(self, unique) -> torch.Tensor:
        """Prompts of one length at a time, each as a whole."""
        whole, caches, logits, order = self.cache, [], [], []
        for length in sorted({len(prompt) for prompt in unique}):
            same = [prompt for prompt in unique if len(prompt) == length]
            self.cache = RowCache(self.model.config, length)
            ids = torch.tensor(same, device=self.device)
            positions = torch.arange(length, device=self.device).expand(len(ids), -1)
            logits.append(self._forward(ids, positions, None))
            caches.append(self.cache)
            order += [unique[prompt] for prompt in same]
        self.cache = whole
        self.cache.join(caches)
        back = torch.tensor(order).argsort().to(self.device)
        self.cache.reorder_cache(back)
        return torch.cat(logits)[back]

    def _forward(self, ids_B_P, positions_B_P, mask) -> torch.Tensor:
        output = self.model(
            input_ids=ids_B_P,
            position_ids=positions_B_P,
            attention_mask=mask,
            past_key_values=self.cache,
            use_cache=True,
            logits_to_keep=1,
        )
        return output.logits[:, -1]

    def run(self) -> list[Generation]:
        step = 0
        while True:
            token_B, log_prob_B = self.sampler.sample(self.logits_B_V, step)
            self._record(step, token_B, log_prob_B)
            left = self._left()
            if left == 0:
                break
            if 2 * left <= self.done_B.numel():
                token_B = self._compact(token_B)
            mask = self.visible_B_L[:, : self.width + step + 1]
            self.logits_B_V = self._forward(token_B[:, None], (self.prompt_length_B + step)[:, None], mask)
            step += 1
        columns = (self.token_R_N, self.log_prob_R_N, self.length_R, self.stopped_R)
        return [
            Generation(tokens[:length], log_probs[:length], "stop" if stopped else "length")
            for tokens, log_probs, length, stopped in zip(*(one.tolist() for one in columns), strict=True)
        ]

    def _record(self, step: int, token_B: torch.Tensor, log_prob_B: torch.Tensor) -> None:
        """Ended rows write beyond their length: to leave them out, the host would have to wait for the device."""
        alive_B = ~self.done_B
        self.token_R_N[self.row_B, step] = token_B
        self.log_prob_R_N[self.row_B, step] = log_prob_B
        self.length_R[self.row_B] += alive_B
        stopped_B = alive_B & (self.stop_B_S == token_B.unsqueeze(1)).any(dim=1)
        self.stopped_R[self.row_B] |= stopped_B
        self.done_B = self.done_B | stopped_B | (self.budget_B == step + 1)

    def _left(self) -> int:
        """Rows that have not ended. The host waits for the device here, once per token, and nowhere else."""
        return self.done_B.numel() - int(self.done_B.sum())

    def _compact(self, token_B: torch.Tensor) -> torch.Tensor:
        keep = (~self.done_B).nonzero()[:, 0]
        self.cache.reorder_cache(keep)
        self.sampler.select(keep)
        for name in ("row_B", "budget_B", "stop_B_S", "done_B", "visible_B_L", "prompt_length_B"):
            setattr(self, name, getattr(self, name)[keep])
        return token_B[keep]


def _common_start(prompts: Collection[tuple[int, ...]]) -> int:
    """Tokens that all prompts share at their beginning; each keeps one of its own, whose logits are the first."""
    if len(prompts) == 1:
        return 0
    ends = zip(min(prompts), max(prompts), strict=False)  # what these two in sorted order share, all share
    shared = len(list(takewhile(lambda pair: pair[0] == pair[1], ends)))
    return min(shared, min(map(len, prompts)) - 1)
