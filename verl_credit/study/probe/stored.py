"""Rollouts that a step stored (`keep_rollouts`), with what a probe must know of the step's update."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from verl_credit.records.run.tables import ROLLOUTS, DamagedTable, read_table
from verl_credit.study.probe.rollouts import Rollouts


@dataclass(frozen=True)
class RolloutFacts:
    """Beside the `Rollouts`, row for row: how they were sampled, and what the loss of the update read of them."""

    step: int
    policy_step: int
    """The parameters of checkpoint ``global_step_{policy_step}`` wrote them."""
    temperature: float
    top_p: float
    top_k: int
    """-1: all tokens"""
    updates: int
    """Of the optimiser in the step; only the first is made at the parameters that wrote the rollouts"""
    rows: int
    """Of the whole batch: those that are not among the rollouts (padding, lost to a fault) count in the loss's means."""
    loss_tokens: int
    """Of the whole batch, rejected ones included: verl's divisor with ``loss_agg_mode=token-mean``."""
    objective: dict
    """``loss_mode``, ``loss_agg_mode``, clip ranges, KL and entropy coefficients, ``grad_clip``, ... by their keys"""
    uid: list[str]
    """The group within which the run compared outcomes; two may have one prompt, where the data has it twice"""
    row: list[int]
    """Places in the batch of the update"""
    turn_ids_B_T: torch.Tensor
    """int64; -1: not the policy's token"""
    clip_scale_B_T: torch.Tensor
    """float64, read where ``objective["dynamic_clip"]``"""
    entropy_B_T: torch.Tensor | None
    """float64, by the training engine over the whole vocabulary, at ``temperature``"""
    ref_log_prob_B_T: torch.Tensor | None
    rollout_is_weight_B_T: torch.Tensor | None


def read_rollouts(path: Path) -> tuple[Rollouts, RolloutFacts]:
    """Of `RUN/tables/rollouts_000012.parquet`. Rows with the same prompt are one group, also where the data has it twice.

    Raises DamagedTable, naming the file, for one that cannot be read, whose rows do not fit together, or that has not all
    rollouts of its step.
    """
    path = Path(path)
    if not path.name.startswith(f"{ROLLOUTS}_"):
        raise DamagedTable(
            f"{path} is no file of rollouts; expected tables/{ROLLOUTS}_000012.parquet of a run"
        )
    table = read_table(path)
    if table.update is None:
        raise DamagedTable(f"{path} has some groups of its step alone: train with keep_rollouts.groups=null")
    try:
        return _rollouts(table.columns), _facts(table.step, table.columns, table.update)
    except (KeyError, TypeError, ValueError, IndexError, RuntimeError) as error:
        raise DamagedTable(f"{path} cannot be read: {type(error).__name__}: {error}") from error


def _rollouts(c: dict[str, list]) -> Rollouts:
    prompts: dict[tuple[int, ...], int] = {}
    return Rollouts(
        prompt_ids=[torch.tensor(ids, dtype=torch.int64) for ids in c["prompt_ids"]],
        response_ids=[torch.tensor(ids, dtype=torch.int64) for ids in c["response_ids"]],
        written_B_T=_padded(c, "written", torch.bool),
        group_B=torch.tensor([prompts.setdefault(tuple(ids), len(prompts)) for ids in c["prompt_ids"]]),
        outcome_B=torch.tensor(c["outcome"], dtype=torch.float64),
        trained_B_T=_padded(c, "trained", torch.bool),
        advantage_B_T=_padded(c, "advantage"),
        log_prob_B_T=_padded(c, "old_log_prob"),
    )


def _facts(step: int, c: dict[str, list], about: dict) -> RolloutFacts:
    return RolloutFacts(
        step=step,
        policy_step=about["policy_step"],
        **{name: about["sampling"][name] for name in ("temperature", "top_p", "top_k")},
        **{name: about[name] for name in ("updates", "rows", "loss_tokens", "objective")},
        uid=c["uid"],
        row=c["row"],
        turn_ids_B_T=_padded(c, "turn", torch.int64, fill=-1),
        clip_scale_B_T=_padded(c, "clip_scale"),
        entropy_B_T=_padded(c, "entropy"),
        ref_log_prob_B_T=_padded(c, "ref_log_prob"),
        rollout_is_weight_B_T=_padded(c, "rollout_is_weight"),
    )


def _padded(c: dict[str, list], name: str, dtype: torch.dtype = torch.float64, fill=0) -> torch.Tensor | None:
    """[B, T] from a list per row; None for a column that the step did not make."""
    if all(row is None for row in c[name]):
        return None
    for place, (row, ids) in enumerate(zip(c[name], c["response_ids"], strict=True)):
        if len(row) != len(ids):
            raise ValueError(f"row {place} has {len(ids)} response_ids and {len(row)} of {name}")
    rows = [torch.tensor(row, dtype=dtype) for row in c[name]]
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=fill)
