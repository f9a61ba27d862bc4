"""turn-group, turn-group-v1d, leave_one_out, turn-group-unbiased: gains from a turn on, compared per prompt and turn."""

from collections.abc import Callable
from typing import Literal

from verl_credit.credit.groups import EPS, VARIANCE_FLOOR, group_stats, minus_others
from verl_credit.credit.operator import (
    CENTRED,
    NORMALISED,
    AtLeastZero,
    BelowOne,
    Count,
    Positive,
    Share,
    WithoutGains,
    leave_one_out_factor,
)
from verl_credit.credit.turn.mode import ModeOutput, turn_mode
from verl_credit.credit.turn.tables import Tables
from verl_credit.lazy import torch


@turn_mode(
    name="turn-group",
    reduces_to="none, when there are no gains",
    bias=(
        "the members of a turn's group are those that came so far: biased when the policy decides how many turns to take; "
        "where a prompt's outcomes tie, R is 0 and the gains' order acts alone, at full size (at about a hundredth of it, "
        "where the whole batch ties)"
    ),
    departures="turns come from turn ids, not from rewards that differ from 0; equal values and groups of one give 0",
    source="2605.06200, released code",
    scope="batch",
    properties=NORMALISED,
    per_turn=True,
)
def turn_group(
    tables: Tables,
    *,
    gamma: Share = 1.0,
    outcome_weight: AtLeastZero = 1.5,
    outcome_gamma_power: Count = 2,
    sigma_floor: Positive = 1e-6,
    norm_by_std: bool = True,
    ddof: Count = 0,
    variance_floor: AtLeastZero = VARIANCE_FLOOR,
    eps: Positive = EPS,
) -> ModeOutput:
    """Scales gains to the outcomes' spread and compares what a row gained from a turn on, the outcome included.

        A_k = z(acc_k per prompt and turn) + outcome_weight R, A_answer = R
        acc_k = s gain_k + gamma acc_(k+1), at the last gain s gain_k + gamma^outcome_gamma_power r
        s = sigma_out / sigma_gain, the population std of the whole batch, at least sigma_floor each

    Released constants: outcome_weight 1.5, outcome_gamma_power 2 (the outcome enters the last gain with gamma^2),
    sigma_floor 1e-6. With power 0 the last gain has all of r, at gamma 0 too. Where all outcomes of a batch tie, sigma_out
    is sigma_floor and the gains all but vanish from acc_k; its z-score brings their order back, at about a hundredth of the
    usual size: the variance floor acts.
    """
    norm = {"norm_by_std": norm_by_std, "ddof": ddof, "variance_floor": variance_floor, "eps": eps}
    sigma_out = _batch_sigma(tables.outcome_B, tables.valid_B, sigma_floor)
    sigma_gain = _batch_sigma(tables.reward_B_K.flatten(), tables.has_reward_B_K.flatten(), sigma_floor)
    gain_B_K = tables.reward_B_K * (sigma_out / sigma_gain)
    zeros_B = torch.zeros_like(tables.outcome_B)
    acc_B_K = tables.backward(zeros_B, lambda k, next_B: gain_B_K[:, k] + gamma * next_B)
    later_B_K = tables.backward(zeros_B, lambda k, next_B: next_B + 1).clamp(min=1) - 1
    acc_B_K = acc_B_K + gamma ** (outcome_gamma_power + later_B_K) * tables.outcome_B[:, None]
    outcome_B = tables.outcome_advantage("grpo", **norm)
    turn_B_K = tables.z_score_per_turn(acc_B_K, **norm) + outcome_weight * outcome_B[:, None]
    return tables.backward(outcome_B, lambda k, _: turn_B_K[:, k]), outcome_B, tables.ones()


def _batch_sigma(values_N: "torch.Tensor", member_N: "torch.Tensor", sigma_floor: float) -> "torch.Tensor":
    """Population std of all members, at least sigma_floor; 1 for one member or none (0-dim)."""
    if not values_N.numel():
        return values_N.new_ones(())
    batch_N = torch.zeros_like(member_N, dtype=torch.long)
    stats = group_stats(values_N, batch_N, member_N=member_N, ddof=0, variance_floor=0.0)
    return stats.std_N[0].clamp(min=sigma_floor)


@turn_mode(
    name="turn-group-v1d",
    reduces_to="none, when there are no gains or alpha is 0",
    bias="as turn-group",
    departures="turns come from turn ids, not from rewards that differ from 0; groups of one give 0",
    source="2605.06200",
    properties=CENTRED | NORMALISED,
    per_turn=True,
)
def turn_group_v1d(
    tables: Tables,
    *,
    gamma: Share = 1.0,
    alpha: AtLeastZero = 0.3,
    clip_beta: BelowOne = 0.3,
    gain_scale: AtLeastZero = 1.0,
    outcome_scale: AtLeastZero = 1.0,
    outcome_operator: str | Callable[..., "torch.Tensor"] = "grpo",
    norm_by_std: bool = True,
    ddof: Count = 0,
    variance_floor: AtLeastZero = VARIANCE_FLOOR,
    eps: Positive = EPS,
) -> ModeOutput:
    """Compares gains per prompt and turn, and adds them up from a turn on; a turn's own gain scales its clip range.

        A_k = alpha D_k / sqrt(n_k) + R, A_answer = R
        D_k = sum over j >= k of gamma^(j-k) z_j over the n_k gains from k on, z_k = z(gain_k per prompt and turn)
        clip scale_k = 1 + clip_beta (2 sigmoid(z_k) - 1)

    A turn without a gain reads the advantage and clip scale of the row's next gain.
    """
    norm = {"norm_by_std": norm_by_std, "ddof": ddof, "variance_floor": variance_floor, "eps": eps}
    z_B_K = tables.z_score_per_turn(tables.reward_B_K, **norm)
    zeros_B = torch.zeros_like(tables.outcome_B)
    sum_B_K = tables.backward(zeros_B, lambda k, next_B: z_B_K[:, k] + gamma * next_B)
    n_B_K = tables.backward(zeros_B, lambda k, next_B: next_B + 1)
    outcome_B = outcome_scale * tables.outcome_advantage(outcome_operator, **norm)
    advantage_B_K = alpha * gain_scale * sum_B_K / n_B_K.clamp(min=1).sqrt() + outcome_B[:, None]
    scale_B_K = adaptive_clip_scale(z_B_K, clip_beta)
    clip_scale_B_K = tables.backward(torch.ones_like(zeros_B), lambda k, _: scale_B_K[:, k])
    return advantage_B_K, outcome_B, clip_scale_B_K


def adaptive_clip_scale(z: "torch.Tensor", beta: float) -> "torch.Tensor":
    """c = 1 + beta (2 sigmoid(z) - 1), in (1 - beta, 1 + beta): a wider range for a turn that gained more."""
    return 1 + beta * (2 * z.sigmoid() - 1)


@turn_mode(
    name="leave_one_out",
    reduces_to="leave-one-out REINFORCE (rloo), when no turn has a reward (outcome=separate)",
    bias=(
        "none at gamma 1 with baseline=absent_zero and every reward there: own sample excluded, no std, every "
        "trajectory is a member of every turn; one that misses a reward reads the outcome's term alone, as if it had "
        "earned what the others did"
    ),
    departures="no release",
    source="2402.14740 for the outcome; the return to go per turn is textbook REINFORCE",
    properties=CENTRED,
    whole_returns=True,
    without_gains=WithoutGains(leave_one_out_factor, norm_by_std=False),
)
def leave_one_out(
    tables: Tables,
    *,
    gamma: Share = 1.0,
    alpha: AtLeastZero = 1.0,
    gain_scale: AtLeastZero = 1.0,
    outcome_scale: AtLeastZero = 1.0,
    outcome: Literal["separate", "last_turn"] = "separate",
    baseline: Literal["absent_zero", "present_only"] = "absent_zero",
) -> ModeOutput:
    """Compares what a row earned from a turn on, and its outcome, with the mean of the prompt's other rows.

        A_k = alpha (G_k - mean of the others' G_k) + R - mean of the others' R
        G_k = sum over j >= k of gamma^(j-k) r_j over the turns of a row, the answer turn included, absent turns 0

    outcome="separate": the answer turn's r is 0. "last_turn": it is R, and the second term is left out.
    baseline="absent_zero": a row without turn k counts with G_k = 0. "present_only": the mean is over the other rows that
    have turn k, and without any the first term is 0; biased where the policy decides when to stop, kept for comparison.
    A trajectory with a lost or a missing turn reward is no member and reads the outcome's term
    (`Tables.missing_reward_B_K`). Groups of one: 0.
    turn-group-unbiased is this with baseline absent_zero, outcome separate, and a clip scale.
    """
    outcome_B = outcome_scale * tables.outcome_advantage("rloo")
    if outcome == "separate":
        advantage_B_K1 = alpha * gain_scale * return_minus_others(tables, gamma, baseline=baseline)
        advantage_B_K, answer_B = tables.split(advantage_B_K1 + outcome_B[:, None])
    else:
        both_B_K1 = tables.reward_B_K1(torch.zeros_like(outcome_B)) * gain_scale
        both_B_K1 = both_B_K1 + torch.where(
            tables.is_answer_B_K1, outcome_scale * tables.outcome_B[:, None], 0.0
        )
        against_B_K1 = return_minus_others(tables, gamma, both_B_K1, baseline=baseline)
        known_B_1 = tables.known_B[:, None]
        advantage_B_K, answer_B = tables.split(
            alpha * torch.where(known_B_1, against_B_K1, outcome_B[:, None])
        )
    return advantage_B_K, answer_B, tables.ones()


def return_minus_others(
    tables: Tables, gamma: float, reward_B_K1: "torch.Tensor | None" = None, *, baseline: str = "absent_zero"
) -> "torch.Tensor":
    """G_k minus the mean of the others' G_k; 0 in rows whose rewards are not all known.

    Rewards: those of the tool turns, if None.
    """
    if reward_B_K1 is None:
        reward_B_K1 = tables.reward_B_K1(torch.zeros_like(tables.outcome_B))
    return_B_K1 = tables.return_to_go(reward_B_K1, gamma)
    member_B_K1 = tables.known_B[:, None].expand_as(return_B_K1)
    if baseline == "present_only":
        member_B_K1 = member_B_K1 & tables.turn_B_K1
    columns = zip(return_B_K1.unbind(dim=1), member_B_K1.unbind(dim=1), strict=True)
    return torch.stack([minus_others(g_B, tables.group_B, member_B) for g_B, member_B in columns], dim=1)


@turn_mode(
    name="turn-group-unbiased",
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
def turn_group_unbiased(
    tables: Tables,
    *,
    gamma: Share = 1.0,
    alpha: AtLeastZero = 0.3,
    clip_beta: BelowOne = 0.3,
    gain_scale: AtLeastZero = 1.0,
    outcome_scale: AtLeastZero = 1.0,
    outcome_operator: str | Callable[..., "torch.Tensor"] = "grpo",
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
