"""The policy over packed rows, in one process: the computation of verl's engine, with transformers alone.

Attention is the project's (`verl_credit.policy.attention`), so that answers can be appended to their rows as in training.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from transformers import PreTrainedModel

from verl_credit.policy.attention import AUTO, PACK, install, pack_rows
from verl_credit.policy.families import Family, Shape, families, reads
from verl_credit.policy.log_probs import log_probs_from_logits, token_values


class PackedPolicy:
    """``budget``: tokens of a micro-batch; a longer row or family is one of its own. ``temperature``: the rollouts'."""

    def __init__(self, model: PreTrainedModel, *, temperature: float = 1.0, budget: int = 2048):
        install()
        self.model, self.budget, self._temperature = model, budget, temperature

    @contextmanager
    def packing(self) -> Iterator[None]:
        """Inside the block the model has the project's attention; a sampler with a cache takes the one it had before."""
        before = self.model.config._attn_implementation
        self.model.set_attn_implementation(AUTO)
        try:
            yield
        finally:
            self.model.set_attn_implementation(before)

    def responses(
        self,
        prompts: Sequence[torch.Tensor],
        responses: Sequence[torch.Tensor],
        read_B_T: torch.Tensor,
        *,
        entropy: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(log_prob_B_T, entropy_B_T) in nats of the response tokens that ``read_B_T`` marks, 0 elsewhere.

        Without ``entropy`` there is no second table. Neighbours of one prompt share their first tokens (`families`).
        """
        shape, values = read_B_T.shape, []
        for members in self.family_batches(families(prompts, responses)):
            hidden_N_D = torch.cat(
                self.hidden([one.stream for one in members], [one.shape for one in members])
            )
            values.append(self._read(hidden_N_D, members, prompts, responses, read_B_T, entropy))
        columns = (torch.cat(parts) for parts in zip(*values, strict=True))
        read = read_B_T.nonzero(as_tuple=True)
        tables = [column.new_zeros(shape).index_put(read, column) for column in columns]
        return tables[0], tables[1] if entropy else None

    def _read(self, hidden_N_D, members, prompts, responses, read_B_T, entropy) -> tuple[torch.Tensor, ...]:
        """Values of every read token."""
        pairs = reads(
            members, prompts, responses, vocabulary=self.model.lm_head.out_features, read_B_T=read_B_T
        )
        logits_P_V = self.model.lm_head(hidden_N_D[pairs.place_P])
        values = token_values(logits_P_V, pairs.label_P, self._tempered(len(logits_P_V)), entropy=entropy)
        return tuple(value_P[pairs.pair_N] for value_P in values.values())

    def log_probs(self, hidden_N_D: torch.Tensor, labels_N: torch.Tensor) -> torch.Tensor:
        """The labels' log-probs at temperature 1, as answers are scored."""
        return log_probs_from_logits(self.model.lm_head(hidden_N_D), labels_N)

    def hidden(
        self, streams: Sequence[torch.Tensor], branches: Sequence[Shape] | None = None
    ) -> list[torch.Tensor]:
        """Last hidden states [tokens, D] of each row and its branches. ``streams`` hold the branches' tokens, too."""
        if self.model.config._attn_implementation != AUTO:  # another one would let rows see each other
            raise ValueError(f"attn_implementation={self.model.config._attn_implementation}: expected {AUTO}")
        shapes = [[] for _ in streams] if branches is None else list(branches)
        trunks = [len(s) - sum(n for _, n in shape) for s, shape in zip(streams, shapes, strict=True)]
        pack = pack_rows(trunks, shapes)
        output = self.model.model(
            input_ids=torch.cat(list(streams))[None],
            position_ids=pack.position_ids()[None],
            use_cache=False,
            **{PACK: pack},
        )
        return list(output.last_hidden_state[0].split([len(stream) for stream in streams]))

    def micro_batches(self, lengths: Sequence[int]) -> Iterator[list[int]]:
        """Neighbours of at most ``budget`` tokens together."""
        place, tokens = [], 0
        for one, length in enumerate(lengths):
            if place and tokens + length > self.budget:
                yield place
                place, tokens = [], 0
            place.append(one)
            tokens += length
        if place:
            yield place

    def family_batches(self, every: Sequence[Family]) -> Iterator[list[Family]]:
        for place in self.micro_batches([len(one.stream) for one in every]):
            yield [every[i] for i in place]

    def _tempered(self, n: int) -> torch.Tensor | None:
        return None if self._temperature == 1 else torch.full((n,), self._temperature)
