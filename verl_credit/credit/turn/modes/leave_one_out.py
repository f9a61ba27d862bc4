"""leave_one_out: the discounted sum of turn rewards from a turn on, compared with the prompt's other trajectories."""

from typing import Literal

import torch

from verl_credit.credit.groups import minus_others
from verl_credit.credit.operator import CENTRED, AtLeastZero, Share, WithoutGains, leave_one_out_factor
from verl_credit.credit.turn.mode import ModeOutput, TurnMode
from verl_credit.credit.turn.tables import Tables


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
    tables: Tables, gamma: float, reward_B_K1: torch.Tensor | None = None, *, baseline: str = "absent_zero"
) -> torch.Tensor:
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


MODE = TurnMode(
    name="leave_one_out",
    function=leave_one_out,
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
