"""The trainer scores for `turns.scorers.Forward`: branches in its ``old_log_probs`` forward, or separate rows through verl's
``compute_log_prob``."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from omegaconf import DictConfig
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu
from verl.workers.utils.padding import response_from_nested

from verl_credit.config.fit import tokens_per_micro_batch
from verl_credit.host.engine.branch_engine import nested
from verl_credit.host.step import store
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
        """Take over ``batch``, the handle that the forward returned."""
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


def score_rows(
    compute_log_prob: Callable[[TensorDict], TensorDict],
    rows: Sequence[ScoreRow],
    *,
    dp_size: int,
    micro_batch: int = 1,
) -> torch.Tensor:
    """Mean log-prob of the gold tokens for every row, float64 [N], at temperature 1. Identical rows are computed once.

    score = (1/|gold|) sum_j log pi(gold_j | context, template, gold_<j)

    Without dynamic batching verl divides every rank's rows into micro-batches of ``micro_batch`` rows, and refuses a
    remainder; therefore the first row is repeated until there is none.
    """
    distinct = list(dict.fromkeys(rows))
    padded = distinct + [distinct[0]] * (-len(distinct) % (dp_size * micro_batch))
    output = compute_log_prob(_log_prob_batch(padded))
    answers = nested([torch.ones(len(row.answer.token_ids)) for row in padded])
    log_probs = response_from_nested(output["log_probs"], answers)
    value = {
        row: log_probs[i][row.answer.gold_start : row.answer.gold_end].double().mean()
        for i, row in enumerate(distinct)
    }
    return torch.stack([value[row] for row in rows])


def rows_per_micro_batch(config: DictConfig) -> int:
    """Rows of a log-prob micro-batch where that number is fixed; 1 with dynamic batching, which takes any number."""
    rollout = config.actor_rollout_ref.rollout
    return 1 if rollout.log_prob_use_dynamic_bsz else rollout.log_prob_micro_batch_size_per_gpu


def _log_prob_batch(rows: Sequence[ScoreRow]) -> TensorDict:
    prompts = [torch.tensor(row.context_ids) for row in rows]
    answers = [torch.tensor(row.answer.token_ids) for row in rows]
    whole = [torch.cat(pair) for pair in zip(prompts, answers, strict=True)]
    mask = nested([torch.ones_like(answer) for answer in answers])
    batch = TensorDict(
        {
            "prompts": nested(prompts),
            "responses": nested(answers),
            "input_ids": nested(whole),
            "position_ids": nested([torch.arange(len(ids)) for ids in whole]),
            "response_mask": mask,
            "loss_mask": mask.clone(),
        },
        batch_size=len(rows),
    )
    tu.assign_non_tensor(batch, calculate_entropy=False, compute_loss=False, temperature=1.0)
    return batch
