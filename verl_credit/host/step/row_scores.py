"""Log-probs of ordinary rows through verl's ``compute_log_prob``; identical rows are computed once."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from omegaconf import DictConfig
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu
from verl.workers.utils.padding import response_from_nested

from verl_credit.turns.scorers import ScoreRow


def score_rows(
    compute_log_prob: Callable[[TensorDict], TensorDict],
    rows: Sequence[ScoreRow],
    *,
    dp_size: int,
    micro_batch: int = 1,
) -> torch.Tensor:
    """Mean log-prob of the gold tokens for every row, float64 [N], at temperature 1.

    score = (1/|gold|) sum_j log pi(gold_j | context, template, gold_<j)

    ``micro_batch``: rows of one, where their number is fixed (no dynamic batching); verl divides every rank's rows into
    such and refuses a remainder. The first row is repeated until none is left.
    """
    distinct = list(dict.fromkeys(rows))
    padded = distinct + [distinct[0]] * (-len(distinct) % (dp_size * micro_batch))
    output = compute_log_prob(_log_prob_batch(padded))
    answers = torch.nested.as_nested_tensor(
        [torch.ones(len(row.answer.token_ids)) for row in padded], layout=torch.jagged
    )
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
    def nested(lists):
        return torch.nested.as_nested_tensor([torch.tensor(x) for x in lists], layout=torch.jagged)

    prompts = [list(row.context_ids) for row in rows]
    answers = [list(row.answer.token_ids) for row in rows]
    masks = [[1] * len(answer) for answer in answers]
    batch = TensorDict(
        {
            "prompts": nested(prompts),
            "responses": nested(answers),
            "input_ids": nested([p + a for p, a in zip(prompts, answers, strict=True)]),
            "position_ids": nested(
                [list(range(len(p) + len(a))) for p, a in zip(prompts, answers, strict=True)]
            ),
            "response_mask": nested(masks),
            "loss_mask": nested(masks),
        },
        batch_size=len(rows),
    )
    tu.assign_non_tensor(batch, calculate_entropy=False, compute_loss=False, temperature=1.0)
    return batch
