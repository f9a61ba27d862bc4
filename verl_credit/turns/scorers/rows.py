"""Information gain by rows: one ordinary row per context through verl's ``compute_log_prob``.

Simple and exact: O(turns x length) tokens. The other scorers are tested against this one.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from verl_credit.config.fit import turns_at_most
from verl_credit.config.resolved import Config
from verl_credit.config.settings import CreditSettings
from verl_credit.turns.batch import TurnBatch
from verl_credit.turns.requests import Request
from verl_credit.turns.scorers.scorer import Forward, GainPlan, Scorer, ScoreRow


class RowScorer(Scorer):
    name = "rows"

    def score(self, plan: GainPlan, forward: Forward) -> torch.Tensor:
        return forward.score_rows(context_rows(plan.requests, plan.turns))

    def says(self, config: Config, settings: CreditSettings) -> str:
        rows = config.data.train_batch_size * config.actor_rollout_ref.rollout.n
        contexts = turns_at_most(config)[1]
        if contexts is None:
            return "one more row per context and alias through compute_log_prob"
        return f"up to {contexts} more rows per trajectory and alias through compute_log_prob: {rows * contexts} a step"


def context_rows(requests: Sequence[Request], turns: TurnBatch) -> list[ScoreRow]:
    """Each request's context and answer as a separate row."""
    ids_of = {row: turns.prompt_ids[row] + turns.response_ids[row] for row in {r.row for r in requests}}
    return [ScoreRow(tuple(ids_of[r.row][: r.base]), r.answer) for r in requests]
