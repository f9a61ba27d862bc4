"""g2po: a prompt's trajectories as paths through shared states, whose values are visits' mean returns."""

from dataclasses import replace
from typing import Literal

from verl_credit.credit.groups import EPS, group_stats, z_score
from verl_credit.credit.operator import AtLeastZero, Positive, Share
from verl_credit.credit.turn.mode import ModeOutput, turn_mode
from verl_credit.credit.turn.modes import gigpo
from verl_credit.credit.turn.tables import Tables
from verl_credit.lazy import torch

BY_STATES = "a better outcome raises the value of its trajectory's states, and a turn from one can fall"


@turn_mode(
    name="g2po",
    reads=("rewards", "groups", "anchors"),
    needs=("anchor_B_K1",),
    default_signal="none",
    reduces_to="gigpo's first term at step_weight 0",
    bias="own sample in the values and means; longer trajectories have more turns in the prompt's mean",
    departures=(
        "each trajectory counts once in the first term; the end of a trajectory is worth its outcome (released: 10 for an "
        "outcome of 10, else 0); no penalty for invalid actions; a prompt of one turn gives 0 (released: NaN); "
        "parity=released: the first term as released"
    ),
    source="2606.22995; Nala-YN/G2PO",
    exempt={"ties": gigpo.BY_DISTANCE, "better": BY_STATES, "no_gains": gigpo.BEYOND_OUTCOMES},
)
def g2po(
    tables: Tables,
    *,
    gamma: Share = 0.95,
    norm: Literal["mean_norm", "mean_std_norm"] = "mean_norm",
    step_weight: AtLeastZero = 1.0,
    variance_floor: AtLeastZero = 0.0,
    eps: Positive = EPS,
    parity: Literal["none", "released"] = "none",
) -> ModeOutput:
    """Compares the states that turns lead to, among turns from the same state, and how far each turn came.

        A_k = z(R) + step_weight (z(V_(k+1) among visits of state k) + z(V_(k+1) - V_k among all turns of the prompt))
        V_k = mean over the visits of state k of gamma^(turns that are left, this one included) R;  V after the answer: R
        z(x) = x - mean with norm="mean_norm", over std + eps (ddof 1) with norm="mean_std_norm"

    Turn rewards are not read. A state is an anchor id of a prompt; a turn without an anchor is alone in its state, whose
    value is its own return, and where the first comparison gives 0.
    """
    norm_by = gigpo.norm_options(norm, variance_floor, eps)
    no_B_K = torch.zeros_like(tables.has_reward_B_K)
    plain = replace(tables, reward_B_K=no_B_K.double(), has_reward_B_K=no_B_K, lost_reward_B_K=no_B_K)
    return_B_K1 = gamma * plain.return_to_go(plain.reward_B_K1(), gamma)
    state_B_K1, visit_B_K1 = gigpo.state_visits(plain)
    stats = group_stats(return_B_K1.flatten(), state_B_K1.flatten(), member_N=visit_B_K1.flatten())
    value_B_K1 = torch.where(visit_B_K1, stats.mean_N.view_as(return_B_K1), return_B_K1)
    value_B_K1 = torch.where(plain.turn_B_K1, value_B_K1, 0.0)
    next_B_K1 = plain.next_value(value_B_K1, plain.outcome_B)
    group_B_K1 = plain.group_B[:, None].expand_as(state_B_K1)

    def z(value_B_K1, of_B_K1, member_B_K1):
        given = {"member_N": member_B_K1.flatten(), "ddof": 1, **norm_by}
        return z_score(value_B_K1.flatten(), of_B_K1.flatten(), **given).view_as(value_B_K1)

    step_B_K1 = z(next_B_K1, state_B_K1, visit_B_K1) + z(next_B_K1 - value_B_K1, group_B_K1, plain.turn_B_K1)
    episode_B_K1, _ = gigpo.episode_advantage(plain, released=parity == "released", **norm_by)
    return *plain.split(episode_B_K1 + step_weight * step_B_K1), plain.ones()
