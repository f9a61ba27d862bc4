"""The policy over packed rows, in one process: the computation of verl's engine, with transformers alone.

Attention is the project's (`policy.attention`), so that answers can be appended to their rows as in training. Neighbouring
rows that begin alike, such as the rollouts of a prompt, are one packed row with their common tokens once: one of the rows is
the prefix of the packed row, the others are branches after the tokens that they share with it. A token attends to the same
tokens as in a row of its own, so its hidden state and its gradient are the same, up to rounding.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise

import torch
from transformers import PreTrainedModel

from verl_credit.errors import PreflightError
from verl_credit.policy.attention.implementation import AUTO, install
from verl_credit.policy.attention.pack import PACK, pack_rows
from verl_credit.policy.families import family_of
from verl_credit.policy.log_probs import log_probs_from_logits, token_values

Shape = list[tuple[int, int]]
"""(base, tokens) of each branch of a packed row."""


@dataclass(frozen=True)
class Group:
    """Neighbouring rows of a prompt. ``stream`` holds the prefix's tokens, then those of the branches in ``shape``."""

    rows: range
    stream: torch.Tensor
    shape: Shape
    places: list[torch.Tensor]
    """The places of each row's tokens in ``stream``."""

    @property
    def trunk(self) -> int:
        """The number of the prefix's tokens."""
        return len(self.stream) - sum(tokens for _, tokens in self.shape)


def groups_of(prompts: Sequence[torch.Tensor], responses: Sequence[torch.Tensor]) -> list[Group]:
    """The groups in the order of the rows; a new one begins where the prompt changes."""
    count = len(prompts)
    starts = [i for i in range(count) if i == 0 or not torch.equal(prompts[i - 1], prompts[i])]
    return [
        _group(range(*ends), [torch.cat((prompts[i], responses[i])) for i in range(*ends)])
        for ends in pairwise([*starts, count])
    ]


@dataclass(frozen=True)
class Reads:
    """P different (place, token) pairs of a packed stream, for N read tokens: rows that share both share the logits."""

    place_P: torch.Tensor
    """The places of the logits, which are at the token before."""
    label_P: torch.Tensor
    pair_N: torch.Tensor
    """The pair of each read token, row by row."""


def reads(
    members: Sequence[Group],
    prompts: Sequence[torch.Tensor],
    responses: Sequence[torch.Tensor],
    *,
    vocabulary: int,
    read_B_T: torch.Tensor | None = None,
) -> Reads:
    """The response tokens that ``read_B_T`` marks (None: all) in the members' streams, which follow each other."""
    first, before, labels = 0, [], []
    for one in members:
        for row, places in zip(one.rows, one.places, strict=True):
            read = slice(None) if read_B_T is None else read_B_T[row, : len(responses[row])]
            before.append(first + places[len(prompts[row]) - 1 : -1][read])
            labels.append(responses[row][read])
        first += len(one.stream)
    pair_P, pair_N = torch.unique(torch.cat(before) * vocabulary + torch.cat(labels), return_inverse=True)
    return Reads(pair_P // vocabulary, pair_P % vocabulary, pair_N)


def _group(rows: range, streams: list[torch.Tensor]) -> Group:
    """Takes as prefix the row with which the branches have the fewest tokens of their own."""
    distinct = {tuple(stream.tolist()): stream for stream in streams}
    bases = {name: [_shared(trunk, one) for one in distinct.values()] for name, trunk in distinct.items()}
    best = min(distinct, key=lambda name: len(name) - sum(bases[name]))
    parts, shape, places, at = [distinct[best]], [], {}, len(best)
    for (name, stream), base in zip(distinct.items(), bases[best], strict=True):
        own = stream[base:]
        places[name] = torch.cat((torch.arange(base), torch.arange(at, at + len(own))))
        if len(own):
            parts.append(own)
            shape.append((base, len(own)))
            at += len(own)
    return Group(rows, torch.cat(parts), shape, [places[tuple(stream.tolist())] for stream in streams])


def _shared(a: torch.Tensor, b: torch.Tensor) -> int:
    """The number of first tokens that are the same in both."""
    n = min(len(a), len(b))
    return int((a[:n] == b[:n]).int().cumprod(0).sum())


class PackedPolicy:
    """``budget``: tokens of a micro-batch; a longer row or group is one of its own. ``temperature``: the rollouts'.

    Raises PreflightError for a model whose packed log-probs would differ from its own.
    """

    def __init__(self, model: PreTrainedModel, *, temperature: float = 1.0, budget: int = 2048):
        family = family_of(model.config)
        if family.fault(AUTO, True, "branch"):
            alone = "the rollouts of a prompt are one packed row here: only layers of full or sliding attention work"
            raise PreflightError(f"{family.name}: {family.why}; {alone}")
        install()
        self.model, self.budget, self._temperature = model, budget, temperature
        self._family = family
        self._require_plain_logits()

    @contextmanager
    def packing(self, attention: str = AUTO) -> Iterator[None]:
        """Inside the block the model has the project's attention; a sampler with a cache takes another one."""
        before = self.model.config._attn_implementation
        self.model.set_attn_implementation(attention)
        try:
            yield
        finally:
            self.model.set_attn_implementation(before)

    @torch.no_grad()
    def _require_plain_logits(self) -> None:
        """Some models scale or cap the logits after `lm_head`, which is all that is computed here."""
        ids, pack, training = torch.zeros(1, 2, dtype=torch.long), pack_rows([2]), self.model.training
        given = {"input_ids": ids, "position_ids": pack.position_ids()[None], "use_cache": False, PACK: pack}
        self.model.eval()
        try:
            with self.packing():
                logits = self.model(**given).logits
                plain = self.model.lm_head(self.model.model(**given).last_hidden_state)
        finally:
            self.model.train(training)
        if not torch.allclose(logits, plain):
            why = "the model changes the logits of its lm_head, which are used as they are here"
            raise PreflightError(f"{self._family.name}: {why}")

    def responses(
        self,
        prompts: Sequence[torch.Tensor],
        responses: Sequence[torch.Tensor],
        read_B_T: torch.Tensor,
        *,
        entropy: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(log_prob_B_T, entropy_B_T) in nats of the response tokens that ``read_B_T`` marks, 0 elsewhere.

        Without ``entropy`` there is no second table. Neighbours of one prompt share their first tokens (`groups_of`).
        """
        head, values = self.model.lm_head, []
        for members in self.group_batches(groups_of(prompts, responses)):
            streams, shapes = [one.stream for one in members], [one.shape for one in members]
            hidden_N_D = torch.cat(self.hidden(streams, shapes))
            pairs = reads(members, prompts, responses, vocabulary=head.out_features, read_B_T=read_B_T)
            logits_P_V = head(hidden_N_D[pairs.place_P])
            tempered = self._temperature != 1
            temperature_P = torch.full((len(logits_P_V),), self._temperature) if tempered else None
            of_pairs = token_values(logits_P_V, pairs.label_P, temperature_P, entropy=entropy)
            values.append([value_P[pairs.pair_N] for value_P in of_pairs.values()])
        columns = (torch.cat(parts) for parts in zip(*values, strict=True))
        read = read_B_T.nonzero(as_tuple=True)
        tables = [column.new_zeros(read_B_T.shape).index_put(read, column) for column in columns]
        return tables[0], tables[1] if entropy else None

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
        position_N = pack.position_ids()
        longest = self._family.longest
        if longest is not None and int(position_N.max()) >= longest:
            tokens = int(position_N.max()) + 1
            raise PreflightError(f"{self._family.name}: {self._family.why}, and a row has {tokens}")
        ids = torch.cat(list(streams))
        given = {"input_ids": ids[None], "position_ids": position_N[None], "use_cache": False, PACK: pack}
        output = self.model.model(**given)
        return list(output.last_hidden_state[0].split([len(stream) for stream in streams]))

    def micro_batches(self, lengths: Sequence[int]) -> Iterator[list[int]]:
        """Neighbours of at most ``budget`` tokens together."""
        place: list[int] = []
        for one, length in enumerate(lengths):
            if place and sum(lengths[i] for i in place) + length > self.budget:
                yield place
                place = []
            place.append(one)
        if place:
            yield place

    def group_batches(self, every: Sequence[Group]) -> Iterator[list[Group]]:
        for place in self.micro_batches([len(one.stream) for one in every]):
            yield [every[i] for i in place]
