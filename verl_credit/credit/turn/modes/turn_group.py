"""turn-group: gains scaled to the outcomes' spread, accumulated with the outcome, compared per prompt and turn."""

import torch

from verl_credit.credit.groups import EPS, VARIANCE_FLOOR, group_stats
from verl_credit.credit.operator import NORMALISED, AtLeastZero, Count, Positive, Share
from verl_credit.credit.turn.mode import ModeOutput, TurnMode
from verl_credit.credit.turn.tables import Tables


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
    batch_B = torch.zeros_like(tables.group_B)
    sigma_out = _batch_sigma(tables.outcome_B, batch_B, tables.valid_B, sigma_floor)
    batch_N = batch_B.repeat_interleave(tables.reward_B_K.shape[1])
    sigma_gain = _batch_sigma(
        tables.reward_B_K.flatten(), batch_N, tables.has_reward_B_K.flatten(), sigma_floor
    )
    gain_B_K = tables.reward_B_K * (sigma_out / sigma_gain)
    zeros_B = torch.zeros_like(tables.outcome_B)
    acc_B_K = tables.backward(zeros_B, lambda k, next_B: gain_B_K[:, k] + gamma * next_B)
    later_B_K = tables.backward(zeros_B, lambda k, next_B: next_B + 1).clamp(min=1) - 1
    acc_B_K = acc_B_K + gamma ** (outcome_gamma_power + later_B_K) * tables.outcome_B[:, None]
    outcome_B = tables.outcome_advantage("grpo", **norm)
    turn_B_K = tables.z_score_per_turn(acc_B_K, **norm) + outcome_weight * outcome_B[:, None]
    return tables.backward(outcome_B, lambda k, _: turn_B_K[:, k]), outcome_B, tables.ones()


def _batch_sigma(
    values_N: torch.Tensor, batch_N: torch.Tensor, member_N: torch.Tensor, sigma_floor: float
) -> torch.Tensor:
    """Population std of all members, at least sigma_floor; 1 for one member or none (0-dim)."""
    if not values_N.numel():
        return values_N.new_ones(())
    stats = group_stats(values_N, batch_N, member_N=member_N, ddof=0, variance_floor=0.0)
    return stats.std_N[0].clamp(min=sigma_floor)


MODE = TurnMode(
    name="turn-group",
    function=turn_group,
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
