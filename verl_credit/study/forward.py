"""A policy in this process as the forward of a scorer of information gain (`turns.scorers.Forward`)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from verl_credit.policy.packed import PackedPolicy
from verl_credit.turns.book import TurnBatch
from verl_credit.turns.branches import decode_branches
from verl_credit.turns.scorers import ScoreRow


class PackedRows:
    """Serves the scorer ``rows``, without a gradient: contexts with their answers are rows of their own."""

    budget = None

    def __init__(self, policy: PackedPolicy):
        self._policy = policy

    @torch.no_grad()
    def score_rows(self, rows: Sequence[ScoreRow]) -> torch.Tensor:
        """Mean log-prob of the gold tokens, float64 [N], at temperature 1; equal rows are computed once."""
        distinct = sorted(dict.fromkeys(rows), key=lambda row: len(row.context_ids))
        streams = [torch.tensor(row.context_ids + row.answer.token_ids) for row in distinct]
        value = {}
        for place in self._policy.micro_batches([len(stream) for stream in streams]):
            hidden = self._policy.hidden([streams[i] for i in place])
            for i, states in zip(place, hidden, strict=True):
                answer, n = distinct[i].answer, len(distinct[i].context_ids)
                start, end = n + answer.gold_start, n + answer.gold_end
                gold = self._policy.log_probs(states[start - 1 : end - 1], streams[i][start:end])
                value[distinct[i]] = gold.double().mean()
        return torch.stack([value[row] for row in rows])


class PackedForward(PackedRows):
    """Serves the scorer ``branch`` for one batch, without a gradient: `carry` appends answers to its rows."""

    def __init__(self, policy: PackedPolicy, turns: TurnBatch):
        super().__init__(policy)
        self._rows = [torch.tensor(p + r) for p, r in zip(turns.prompt_ids, turns.response_ids, strict=True)]
        self._carried: list[torch.Tensor] = []

    @torch.no_grad()
    def carry(self, branches: torch.Tensor) -> None:
        """An answer after a context that several rows share is computed once, and no row beyond its last new answer."""
        answers_B = [list(_answers(row)) for row in branches.unbind()]
        deepest = sorted(
            range(len(answers_B)), key=lambda row: -max((base for base, _ in answers_B[row]), default=0)
        )
        value_of, streams, shapes, keys = {}, [], [], []
        for row in deepest:
            row_ids = tuple(self._rows[row].tolist())
            new = {
                (row_ids[:base], ids): base
                for base, ids in answers_B[row]
                if (row_ids[:base], ids) not in value_of
            }
            value_of |= dict.fromkeys(new)
            if new:
                answers = [torch.tensor(ids) for _, ids in new]
                streams.append(torch.cat([self._rows[row][: max(new.values())], *answers]))
                shapes.append([(base, len(ids)) for (_, ids), base in new.items()])
                keys.append(list(new))
        for place in self._policy.micro_batches([len(stream) for stream in streams]):
            hidden = self._policy.hidden([streams[i] for i in place], [shapes[i] for i in place])
            for i, states_N_D in zip(place, hidden, strict=True):
                lengths = [tokens for _, tokens in shapes[i]]
                ids = streams[i][-sum(lengths) :]  # the label of an answer's last token is never read
                log_probs = self._policy.log_probs(states_N_D[-sum(lengths) :], ids.roll(-1))
                value_of |= dict(zip(keys[i], log_probs.split(lengths), strict=True))
        self._carried = [
            torch.cat(
                [value_of[tuple(row_ids[:base].tolist()), ids] for base, ids in answers]
                or [row_ids.new_zeros(0)]
            )
            for row_ids, answers in zip(self._rows, answers_B, strict=True)
        ]

    def carried(self) -> list[torch.Tensor]:
        return self._carried


def _answers(encoded: torch.Tensor) -> Iterator[tuple[int, tuple[int, ...]]]:
    """(base, token ids) of every branch of a row."""
    shape, ids = decode_branches(encoded)
    for (base, _), own in zip(shape, ids.split([tokens for _, tokens in shape]), strict=True):
        yield base, tuple(own.tolist())
