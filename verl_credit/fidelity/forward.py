"""What scorers of information gain ask of a policy in this process."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

from verl_credit.turns.scorers import ScoreRow


class PolicyForward:
    """`turns.scorers.Forward` for the scorer ``rows``: ordinary rows through the policy, in this process."""

    budget = None

    def __init__(self, model: PreTrainedModel, pad_token_id: int, rows_at_once: int = 32):
        self._model, self._pad, self._at_once = model, pad_token_id, rows_at_once

    @torch.inference_mode()
    def score_rows(self, rows: Sequence[ScoreRow]) -> torch.Tensor:
        """Mean log-prob of the gold tokens, float64 [N], at temperature 1; equal rows are computed once."""
        distinct = sorted(dict.fromkeys(rows), key=lambda row: len(row.context_ids))
        value: dict[ScoreRow, torch.Tensor] = {}
        for begin in range(0, len(distinct), self._at_once):
            part = distinct[begin : begin + self._at_once]
            full = [[*row.context_ids, *row.answer.token_ids] for row in part]
            width, kept = max(map(len, full)), max(len(row.answer.token_ids) for row in part) + 1
            ids_R_P = torch.tensor([[self._pad] * (width - len(ids)) + ids for ids in full])
            visible_R_P = torch.tensor([[0] * (width - len(ids)) + [1] * len(ids) for ids in full])
            logits = self._model(
                input_ids=ids_R_P,
                attention_mask=visible_R_P,
                position_ids=(visible_R_P.cumsum(dim=1) - 1).clamp(min=0),
                use_cache=False,
                logits_to_keep=kept,
            ).logits
            log_prob_R_n = logits[:, :-1].double().log_softmax(dim=-1)
            log_prob_R_n = log_prob_R_n.gather(2, ids_R_P[:, 1 - kept :, None])[:, :, 0]
            for row, log_prob in zip(part, log_prob_R_n, strict=True):
                n = len(row.answer.token_ids)
                of_answer = log_prob[kept - 1 - n :]
                value[row] = of_answer[row.answer.gold_start : row.answer.gold_end].mean()
        return torch.stack([value[row] for row in rows])
