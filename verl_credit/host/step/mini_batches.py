"""Updates of rollouts that return several outputs: a mini-batch has the recipe's number of rollouts, however many rows."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, lcm

import torch
from omegaconf import DictConfig, OmegaConf
from verl.trainer.ppo.padding_utils import upsample_batch_to_divisible_size
from verl.utils.seqlen_balancing import calculate_workload, get_seqlen_balanced_partitions

from verl_credit.recipe.step_size import EACH, MINI_BATCH

MICRO = (
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu",
    "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu",
    "critic.ppo_micro_batch_size_per_gpu",
    "critic.forward_micro_batch_size_per_gpu",
)
"""The rows of a rank's micro-batches, which verl does not round."""


def by_sessions(batch, outputs_S: Sequence[Sequence[int]], config: DictConfig, ranks: int, eos: int):
    """(the batch, the rows of a mini-batch). Rows stand as verl's workers divide them: rank by rank, and in a rank
    mini-batch by mini-batch. A mini-batch has the outputs of ``ppo_mini_batch_size`` times ``rollout.n`` sessions, and
    verl's padding rows up to the size of the largest."""
    sessions = OmegaConf.select(config, MINI_BATCH) * OmegaConf.select(config, EACH)
    updates = ceil(len(outputs_S) / sessions)
    rows_U = [
        [row for outputs in outputs_S[number * sessions : (number + 1) * sessions] for row in outputs]
        for number in range(updates)
    ]
    unit = ranks * lcm(*(OmegaConf.select(config, key) or 1 for key in MICRO))
    size = ceil(max(map(len, rows_U)) / unit) * unit
    padding = range(len(batch.keys), updates * size)
    batch = upsample_batch_to_divisible_size(batch, updates * size, eos)
    fill, order_R = iter(padding), [[] for _ in range(ranks)]
    for rows in rows_U:
        rows = [*rows, *(next(fill) for _ in range(size - len(rows)))]
        lengths = torch.tensor([batch.tags[row]["seq_len"] for row in rows])
        parts = get_seqlen_balanced_partitions(calculate_workload(lengths), ranks, equal_size=True)
        for order, part in zip(order_R, parts, strict=True):
            order += [rows[place] for place in part]
    batch.reorder([row for order in order_R for row in order])
    return batch, size


class WithRows:
    """Workers that update with mini-batches of ``rows`` rows; verl's own call gives the number of rollouts, by which the
    loss is divided."""

    def __init__(self, workers, rows: int):
        self._workers, self._rows = workers, rows

    def __getattr__(self, name: str):
        def call(batch):
            batch.extra_info["mini_batch_size"] = self._rows
            return getattr(self._workers, name)(batch)

        return call
