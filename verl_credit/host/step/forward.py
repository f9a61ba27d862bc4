"""What the trainer offers to the scorers around its ``old_log_probs`` forward (`turns.scorers.Forward`)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from omegaconf import DictConfig

from verl_credit.config.fit import tokens_per_micro_batch
from verl_credit.host.step import store
from verl_credit.host.step.row_scores import rows_per_micro_batch, score_rows
from verl_credit.names import BRANCH_LOG_PROBS, BRANCHES, SCORE_BRANCHES
from verl_credit.turns.scorers import ScoreRow

OLD_LOG_PROBS = "old_log_probs"


class TrainerForward:
    """``batch``: the handle of the step's rows, with the fields that a scorer has added."""

    def __init__(self, batch, workers, config: DictConfig) -> None:
        self.batch, self._workers, self._config = batch, workers, config
        self.budget = tokens_per_micro_batch(config)

    def carry(self, branches: torch.Tensor) -> None:
        self.batch = store.write(self.batch, {BRANCHES: branches})
        self.batch.extra_info[SCORE_BRANCHES] = True

    def ran(self, batch) -> None:
        """The forward is over; ``batch`` is the handle that it returned."""
        self.batch = batch
        batch.extra_info.pop(SCORE_BRANCHES, None)

    def carried(self) -> list[torch.Tensor]:
        return list(store.read(self.batch, BRANCH_LOG_PROBS)[BRANCH_LOG_PROBS].unbind())

    def written(self) -> list[torch.Tensor]:
        return list(store.read(self.batch, OLD_LOG_PROBS)[OLD_LOG_PROBS].unbind())

    def score_rows(self, rows: Sequence[ScoreRow]) -> torch.Tensor:
        known = self._workers._dispatch_info
        if "actor" not in known:  # verl asks at the first step
            known["actor"] = self._workers._query_dispatch_info("actor")
        return score_rows(
            self._workers.compute_log_prob,
            rows,
            dp_size=max(known["actor"]) + 1,
            micro_batch=rows_per_micro_batch(self._config),
        )
