"""The policy over packed rows, in one process: what verl's engine computes, with transformers alone.

Attention is the project's (`verl_credit.attention`), so answers can ride behind their rows as in training.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from transformers import PreTrainedModel

from verl_credit.attention import AUTO, PACK, pack_rows
from verl_credit.log_probs.chunks import log_probs_and_entropy, log_probs_from_logits

Shape = list[tuple[int, int]]
"""(base, tokens) of each answer behind a row."""


class PackedPolicy:
    """``budget``: tokens of a micro-batch; a longer row is one of its own. ``temperature`` as the rollouts had."""

    def __init__(self, model: PreTrainedModel, *, temperature: float = 1.0, budget: int = 2048):
        self.model, self.budget, self._temperature = model, budget, temperature

    def responses(
        self, prompts: Sequence[torch.Tensor], responses: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(log_prob_B_T, entropy_B_T) in nats of every response token, observations included, 0 beyond a row's end."""
        streams = [torch.cat(pair) for pair in zip(prompts, responses, strict=True)]
        found = [None] * len(streams)
        for place in self.micro_batches([len(stream) for stream in streams]):
            hidden = self.hidden([streams[i] for i in place])
            before = [h[len(prompts[i]) - 1 : -1] for i, h in zip(place, hidden, strict=True)]
            labels = [responses[i] for i in place]
            logits_N_V = self.model.lm_head(torch.cat(before))
            values = log_probs_and_entropy(logits_N_V, torch.cat(labels), self._tempered(len(logits_N_V)))
            parts = [value.split([len(label) for label in labels]) for value in values]
            for i, *pair in zip(place, *parts, strict=True):
                found[i] = pair
        return tuple(
            torch.nn.utils.rnn.pad_sequence(rows, batch_first=True) for rows in zip(*found, strict=True)
        )

    def log_probs(self, hidden_N_D: torch.Tensor, labels_N: torch.Tensor) -> torch.Tensor:
        """At temperature 1, as answers are scored."""
        return log_probs_from_logits(self.model.lm_head(hidden_N_D), labels_N)

    def hidden(
        self, streams: Sequence[torch.Tensor], branches: Sequence[Shape] | None = None
    ) -> list[torch.Tensor]:
        """Last hidden states [tokens, D] of each row, its branches behind it. ``streams`` hold those tokens, too."""
        if self.model.config._attn_implementation != AUTO:  # another one would let rows see each other
            raise ValueError(f"attn_implementation={self.model.config._attn_implementation}: expected {AUTO}")
        grown = [[] for _ in streams] if branches is None else list(branches)
        trunks = [len(s) - sum(n for _, n in shape) for s, shape in zip(streams, grown, strict=True)]
        pack = pack_rows(trunks, grown)
        output = self.model.model(
            input_ids=torch.cat(list(streams))[None],
            position_ids=pack.position_ids()[None],
            use_cache=False,
            **{PACK: pack},
        )
        return list(output.last_hidden_state[0].split([len(stream) for stream in streams]))

    def micro_batches(self, lengths: Sequence[int]) -> Iterator[list[int]]:
        """Neighbouring rows of at most ``budget`` tokens."""
        place, tokens = [], 0
        for row, length in enumerate(lengths):
            if place and tokens + length > self.budget:
                yield place
                place, tokens = [], 0
            place.append(row)
            tokens += length
        if place:
            yield place

    def _tempered(self, n: int) -> torch.Tensor | None:
        return None if self._temperature == 1 else torch.full((n,), self._temperature)
