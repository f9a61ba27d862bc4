"""hgpo: what a trajectory earned from a turn on, compared among visits of the same state after the same history."""

from typing import Literal

import torch

from verl_credit.credit.groups import EPS
from verl_credit.credit.operator import AtLeastZero, Count, Number, Positive, Share
from verl_credit.credit.turn.mode import ModeOutput, TurnMode
from verl_credit.credit.turn.modes.gigpo import (
    BEYOND_OUTCOMES,
    BY_DISTANCE,
    BY_VISITS,
    compared,
    episode_advantage,
    joined,
    norm_options,
    state_visits,
)
from verl_credit.credit.turn.tables import Tables


def hgpo(
    tables: Tables,
    *,
    gamma: Share = 1.0,
    norm: Literal["mean_norm", "mean_std_norm"] = "mean_std_norm",
    history_length: Count = 2,
    length_weight_alpha: AtLeastZero = 1.0,
    weight_offset: Number = 2,
    base_group: bool = False,
    variance_floor: AtLeastZero = 0.0,
    eps: Positive = EPS,
    parity: Literal["none", "released"] = "none",
) -> ModeOutput:
    """Compares a turn with those that share its last states, at every length of that history.

        A_k = sum over h of w_h a^h_k / sum over h of w_h, over the levels with two members
        a^h_k = z(G_k among turns of the prompt with the same states k-h .. k), h = 0 .. min(history_length, k)
        w_h = (h + weight_offset)^length_weight_alpha
        G_k = sum over j >= k of gamma^(j-k) r_j, the answer turn's r is the outcome

    z divides by the population std plus eps with
    norm="mean_std_norm". No level with two members: 0. base_group adds GiGPO's first term as one more level of weight 1
    (ddof 1); without it a turn in a state of its own gets 0, success or not.
    A trajectory with a lost or a missing turn reward is no member and reads its outcome's advantage alone
    (`Tables.missing_reward_B_K`).
    Released defects that are not here: a level whose advantage is 0 (a tie, or a return at the mean) is dropped, and the
    others grow; the weights' sum has 1e-6 added; the base group is weighed by the number of turns. parity="released" brings
    back these three, in float32. Weights start at 2 as released; an older copy starts at 1 (weight_offset).
    """
    released, options = parity == "released", norm_options(norm, variance_floor, eps)
    compared_by = {"released": released, **options}
    return_B_K1 = tables.return_to_go(tables.reward_B_K1(), gamma)
    levels = []
    state_B_K1, visit_B_K1 = state_visits(tables)
    path_B_K1, member_B_K1 = state_B_K1, visit_B_K1
    for h in range(min(history_length, return_B_K1.shape[1] - 1) + 1):
        if h:
            path_B_K1 = joined(_after(path_B_K1), state_B_K1)
            member_B_K1 = _after(member_B_K1) & visit_B_K1
        weight = float(h + weight_offset) ** length_weight_alpha
        level = compared(return_B_K1, path_B_K1, member_B_K1, tables.rounding(gamma), ddof=0, **compared_by)
        levels.append((weight, *level))
    if base_group:
        levels.append((1.0, *episode_advantage(tables, **compared_by)))
    total_B_K1, weight_B_K1 = torch.zeros_like(return_B_K1), torch.zeros_like(return_B_K1)
    for weight, value_B_K1, several_B_K1 in levels:
        kept_B_K1 = (value_B_K1 != 0) if released else several_B_K1
        total_B_K1 = total_B_K1 + weight * torch.where(kept_B_K1, value_B_K1, 0.0)
        weight_B_K1 = weight_B_K1 + weight * kept_B_K1
    divisor_B_K1 = weight_B_K1 + 1e-6 if released else torch.where(weight_B_K1 > 0, weight_B_K1, 1.0)
    outcome_B = tables.outcome_advantage("grpo", ddof=1, **options)
    advantage_B_K1 = torch.where(tables.known_B[:, None], total_B_K1 / divisor_B_K1, outcome_B[:, None])
    return *tables.split(advantage_B_K1), tables.ones()


def _after(table_B_K1: torch.Tensor) -> torch.Tensor:
    """Each turn's entry at the next turn; 0 at the first."""
    return torch.nn.functional.pad(table_B_K1[:, :-1], (1, 0))


MODE = TurnMode(
    name="hgpo",
    function=hgpo,
    reads=("rewards", "groups", "gains", "anchors"),
    needs=("anchor_B_K1",),
    default_signal="none",
    reduces_to="GiGPO's second term, with population std, at history_length 0",
    bias=(
        "own sample in the means; the visits of a state depend on the policy; a state of its own gets 0; a trajectory that "
        "misses a turn's reward is no member and reads its outcome alone"
    ),
    departures=(
        "a level of advantage 0 counts like any other; base_group counts each trajectory once; ties give 0; "
        "parity=released: as released"
    ),
    source="2602.22817; langfengQ/verl-agent",
    whole_returns=True,
    exempt={"ties": BY_DISTANCE, "better_tools": BY_VISITS, "no_gains": BEYOND_OUTCOMES},
)
