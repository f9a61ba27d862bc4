"""turn-group-unbiased: a baseline per prompt and turn that the trajectory itself does not enter."""

from collections.abc import Callable

import torch

from verl_credit.credit.groups import EPS, VARIANCE_FLOOR
from verl_credit.credit.operator import (
    CENTRED,
    AtLeastZero,
    BelowOne,
    Positive,
    Share,
    WithoutGains,
    leave_one_out_factor,
)
from verl_credit.credit.turn.mode import ModeOutput, TurnMode
from verl_credit.credit.turn.modes.leave_one_out import return_minus_others
from verl_credit.credit.turn.modes.turn_group_v1d import adaptive_clip_scale
from verl_credit.credit.turn.tables import Tables


def turn_group_unbiased(
    tables: Tables,
    *,
    gamma: Share = 1.0,
    alpha: AtLeastZero = 0.3,
    clip_beta: BelowOne = 0.3,
    gain_scale: AtLeastZero = 1.0,
    outcome_scale: AtLeastZero = 1.0,
    outcome_operator: str | Callable[..., torch.Tensor] = "grpo",
    variance_floor: AtLeastZero = VARIANCE_FLOOR,
    eps: Positive = EPS,
) -> ModeOutput:
    """Return-to-go of the gains minus the mean of the prompt's other trajectories, plus the outcome.

        A_k = alpha (G_k - mean of the others' G_k) + R
        G_k = sum over j >= k of gamma^(j-k) gain_j over all turns of the table, absent turns 0
        R = r - mean of the others' r (operator grpo)

    The answer turn's own G is 0: whether a trajectory searches once more or answers
    is the policy's choice, and a baseline that only one of the two choices carries would reward the other. No std
    and no 1/sqrt(n): both depend on the trajectory's own sample. Other operators' R are used as they are.
    A trajectory with a lost or a missing gain (`Tables.missing_reward_B_K`) is no member of the gains' baseline and reads
    R alone, as if it had earned what the others did. One member: 0. What these rows would have added is the only bias; a
    gain of 0 in place of the missing one would stand in the row's own return and in every baseline. A first turn that no
    row of the prompt is measured at (first_turn="none") earns 0 in all of them, which has no bias.
    The clip scale is that of turn-group-v1d (variance_floor and eps are of its z-score); the baseline is unbiased for the
    unclipped gradient.
    """
    operator = "rloo" if outcome_operator == "grpo" else outcome_operator
    outcome_B = tables.outcome_advantage(operator)
    outcome_B_1 = outcome_scale * outcome_B[:, None]
    advantage_B_K1 = alpha * gain_scale * return_minus_others(tables, gamma) + outcome_B_1
    advantage_B_K, answer_B = tables.split(advantage_B_K1)
    z_B_K = tables.z_score_per_turn(tables.reward_B_K, variance_floor=variance_floor, eps=eps)
    scale_B_K = torch.where(tables.has_reward_B_K, adaptive_clip_scale(z_B_K, clip_beta), 1.0)
    return advantage_B_K, answer_B, scale_B_K


MODE = TurnMode(
    name="turn-group-unbiased",
    function=turn_group_unbiased,
    reduces_to="leave-one-out REINFORCE (rloo), when there are no gains",
    bias=(
        "none at gamma 1 while every reward is there (at .9 it is no gradient of a sum of r and gains, by 3 %): own "
        "sample excluded, no std, every trajectory is a member of every turn; one that misses a reward reads R alone,"
        " as if it had earned what the others did"
    ),
    departures="ours",
    source="this project",
    properties=CENTRED,
    whole_returns=True,
    without_gains=WithoutGains(leave_one_out_factor, norm_by_std=False),
)
