"""What the twin offers to a scorer of information gain (`turns.scorers.Forward`)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from verl_credit.turns.batch import TurnBatch
from verl_credit.turns.branches import decode_branches
from verl_credit.turns.scorers import ScoreRow
from verl_credit.twin.packed import PackedPolicy


class TwinForward:
    """One batch: `score_rows` and the answers of `carry` are run without a gradient."""

    budget = None

    def __init__(self, policy: PackedPolicy, turns: TurnBatch, log_prob_B_T: torch.Tensor):
        self._policy, self._log_prob_B_T = policy, log_prob_B_T
        self._trunks = [
            torch.tensor(p + r) for p, r in zip(turns.prompt_ids, turns.response_ids, strict=True)
        ]
        self._lengths = [len(ids) for ids in turns.response_ids]
        self._carried: list[torch.Tensor] = []

    @torch.no_grad()
    def carry(self, branches: torch.Tensor) -> None:
        decoded = [decode_branches(row) for row in branches.unbind()]
        streams = [torch.cat([trunk, ids]) for trunk, (_, ids) in zip(self._trunks, decoded, strict=True)]
        self._carried = [None] * len(streams)
        for place in self._policy.micro_batches([len(stream) for stream in streams]):
            hidden = self._policy.hidden([streams[i] for i in place], [decoded[i][0] for i in place])
            for i, states in zip(place, hidden, strict=True):
                ids = decoded[i][1]  # the label of a branch's last token is never read
                self._carried[i] = self._policy.log_probs(states[len(self._trunks[i]) :], ids.roll(-1))

    def carried(self) -> list[torch.Tensor]:
        return self._carried

    def written(self) -> list[torch.Tensor]:
        return [row[:n] for row, n in zip(self._log_prob_B_T, self._lengths, strict=True)]

    @torch.no_grad()
    def score_rows(self, rows: Sequence[ScoreRow]) -> torch.Tensor:
        streams = [torch.tensor(row.context_ids + row.answer.token_ids) for row in rows]
        found = torch.empty(len(rows), dtype=torch.float64)
        for place in self._policy.micro_batches([len(stream) for stream in streams]):
            hidden = self._policy.hidden([streams[i] for i in place])
            for i, states in zip(place, hidden, strict=True):
                answer, n = rows[i].answer, len(rows[i].context_ids)
                start, end = n + answer.gold_start, n + answer.gold_end
                found[i] = (
                    self._policy.log_probs(states[start - 1 : end - 1], streams[i][start:end]).double().mean()
                )
        return found
