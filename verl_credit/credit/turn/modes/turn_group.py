"""turn-group: gains scaled to the outcomes' spread, accumulated with the outcome, compared per prompt and turn."""

import torch

from verl_credit.credit.groups import group_stats
from verl_credit.credit.operator import NORMALISED
from verl_credit.credit.turn.mode import ModeOutput, TurnMode
from verl_credit.credit.turn.tables import Tables


def turn_group(tables: Tables) -> ModeOutput:
    """s     = sigma_out / sigma_gain     (population std of the whole batch, at least sigma_floor each)
    acc_k = s gain_k + gamma acc_{k+1}     (last gain: s gain + gamma^outcome_gamma_power r)
    A_k   = z(acc_k) + outcome_weight R,   A_answer = R
    """
    batch_B = torch.zeros_like(tables.group_B)
    sigma_out = _batch_sigma(tables, tables.outcome_B, batch_B, tables.valid_B)
    batch_N = batch_B.repeat_interleave(tables.gain_B_K.shape[1])
    sigma_gain = _batch_sigma(tables, tables.gain_B_K.flatten(), batch_N, tables.has_gain_B_K.flatten())
    gain_B_K = tables.gain_B_K * (sigma_out / sigma_gain)
    seed_B = tables.gamma ** (tables.outcome_gamma_power - 1) * tables.outcome_B
    acc_B_K = tables.backward(seed_B, lambda k, next_B: gain_B_K[:, k] + tables.gamma * next_B)
    outcome_B = tables.outcome_advantage()
    turn_B_K = tables.z_score_per_turn(acc_B_K) + tables.outcome_weight * outcome_B[:, None]
    return tables.backward(outcome_B, lambda k, _: turn_B_K[:, k]), outcome_B, tables.ones()


def _batch_sigma(
    tables: Tables, values_N: torch.Tensor, batch_N: torch.Tensor, member_N: torch.Tensor
) -> torch.Tensor:
    """Population std of all members, at least sigma_floor; 1 for one member or none (0-dim)."""
    if not values_N.numel():
        return values_N.new_ones(())
    stats = group_stats(values_N, batch_N, member_N=member_N, ddof=0, variance_floor=0.0)
    return stats.std_N[0].clamp(min=tables.sigma_floor)


MODE = TurnMode(
    name="turn-group",
    function=turn_group,
    equation=(
        "acc_k = (sigma_out / sigma_gain) gain_k + gamma acc_(k+1), acc after the last gain = gamma r; "
        "A_k = z(acc_k per prompt and turn) + 1.5 R"
    ),
    reduces_to="none, when there are no gains",
    bias="the members of a turn's group are those that came so far: biased when the policy decides how many turns to take",
    source="2605.06200, released code",
    scope="batch",
    properties=NORMALISED,
    any_outcome_operator=False,
    curriculum=False,
)
