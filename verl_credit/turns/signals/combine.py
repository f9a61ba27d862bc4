"""Several signals as one turn reward."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from verl_credit.credit.groups import z_score
from verl_credit.turns.signals.signal import Signal, StepRows

Table = tuple[torch.Tensor, torch.Tensor]


def combined(
    tables: Mapping[Signal, Table], weights: Mapping[Signal, float], rows: StepRows, normalise: str
) -> Table:
    """(reward_B_K, has_reward_B_K): sum over signals of weight times reward.

    normalise="group": each signal is z-scored over the prompt's turns that have it, before it is weighed; a signal that is
    equal everywhere then adds 0. A turn that lacks a signal gets the others: 0 is that signal's mean. "none": signals are
    added as they are, for turns that have all of them: 0 would be a reward of its own, which may be the best one.
    A turn whose reward was lost in one signal is lost in the sum.
    """
    total_B_K = torch.zeros_like(rows.gain_B_K, dtype=torch.float64)
    together, start = (torch.logical_or, False) if normalise == "group" else (torch.logical_and, True)
    sum_B_K = torch.full_like(rows.has_gain_B_K, start)
    for signal, (reward_B_K, has_B_K) in tables.items():
        known_B_K = has_B_K & reward_B_K.isfinite()
        part_B_K = torch.where(known_B_K, reward_B_K.to(torch.float64), 0.0)
        if normalise == "group":
            group_B_K = rows.group_B[:, None].expand_as(part_B_K)
            member_B_K = known_B_K & rows.turns.row_valid_B[:, None]
            z_N = z_score(part_B_K.flatten(), group_B_K.flatten(), member_N=member_B_K.flatten())
            part_B_K = z_N.view_as(part_B_K)
        lost_B_K = has_B_K & ~known_B_K
        total_B_K = total_B_K + weights[signal] * torch.where(lost_B_K, torch.nan, part_B_K)
        sum_B_K = together(sum_B_K, has_B_K)
    return torch.where(sum_B_K, total_B_K, 0.0), sum_B_K
