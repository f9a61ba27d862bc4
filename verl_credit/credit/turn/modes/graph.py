"""g2po, bipace: a prompt's trajectories as paths through shared states, whose values are visits' mean returns."""

from dataclasses import replace
from typing import Literal

from verl_credit.credit.groups import EPS, group_stats, z_score
from verl_credit.credit.operator import AtLeastZero, Positive, Share
from verl_credit.credit.turn.mode import ModeOutput, turn_mode
from verl_credit.credit.turn.modes import gigpo
from verl_credit.credit.turn.tables import Tables
from verl_credit.lazy import torch

BY_STATES = "a better outcome raises the value of its trajectory's states, and a turn from one can fall"


def state_values(tables: Tables, return_B_K1: "torch.Tensor") -> "tuple[torch.Tensor, ...]":
    """(mean return of all visits of the turn's state, state, is a visit); a turn without an anchor has its own return."""
    state_B_K1, visit_B_K1 = gigpo.state_visits(tables)
    stats = group_stats(return_B_K1.flatten(), state_B_K1.flatten(), member_N=visit_B_K1.flatten())
    value_B_K1 = torch.where(visit_B_K1, stats.mean_N.view_as(return_B_K1), return_B_K1)
    return torch.where(tables.turn_B_K1, value_B_K1, 0.0), state_B_K1, visit_B_K1


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

    Turn rewards are not read. A state is an anchor id of a prompt; a turn without an anchor is alone in its state, where
    the first comparison gives 0.
    """
    norm_by = gigpo.norm_options(norm, variance_floor, eps)
    no_B_K = torch.zeros_like(tables.has_reward_B_K)
    no_rewards = {"reward_B_K": no_B_K.double(), "has_reward_B_K": no_B_K, "lost_reward_B_K": no_B_K}
    plain = replace(tables, **no_rewards)
    return_B_K1 = gamma * plain.return_to_go(plain.reward_B_K1(), gamma)
    value_B_K1, state_B_K1, visit_B_K1 = state_values(plain, return_B_K1)
    next_B_K1 = plain.next_value(value_B_K1, plain.outcome_B)
    group_B_K1 = plain.group_B[:, None].expand_as(state_B_K1)

    def z(value_B_K1, of_B_K1, member_B_K1):
        given = {"member_N": member_B_K1.flatten(), "ddof": 1, **norm_by}
        return z_score(value_B_K1.flatten(), of_B_K1.flatten(), **given).view_as(value_B_K1)

    step_B_K1 = z(next_B_K1, state_B_K1, visit_B_K1) + z(next_B_K1 - value_B_K1, group_B_K1, plain.turn_B_K1)
    episode_B_K1, _ = gigpo.episode_advantage(plain, released=parity == "released", **norm_by)
    return *plain.split(episode_B_K1 + step_weight * step_B_K1), plain.ones()


@turn_mode(
    name="bipace",
    reads=("rewards", "groups", "gains", "anchors"),
    needs=("anchor_B_K1",),
    default_signal="none",
    reduces_to="gigpo at means=all, where no two turns lead to the same state",
    bias="own sample in the prompt's mean, and at means=all in all means; the visits of a state depend on the policy; a "
    "trajectory that misses a turn's reward is no member and reads its outcome alone",
    departures=(
        "actions are equal where they lead to the same state: for a search, the returned pages; means leave out the own "
        "trajectory; an action that nobody else took is worth what it earned. The paper's formulas were read in a "
        "description, not in its code"
    ),
    source="2606.25556",
    whole_returns=True,
    exempt={"ties": gigpo.BY_DISTANCE, "no_gains": gigpo.BEYOND_OUTCOMES},
)
def bipace(
    tables: Tables,
    *,
    gamma: Share = 1.0,
    step_weight: AtLeastZero = 1.0,
    means: Literal["others", "all"] = "others",
) -> ModeOutput:
    """Compares an action of a state with the state: its own luck counts only where nobody else took that action.

        A_k = (R - mean R of the prompt) + step_weight (Q_k - V_k)
        V_k = mean of G over the visits of state k,  Q_k = mean of G over those that lead to the same state as turn k
        G_k = sum over j >= k of gamma^(j-k) r_j, the answer turn's r is the outcome

    means="others": over visits of the prompt's other trajectories. Without any V_k there the second term is 0; without any
    Q_k it is G_k, and so it is for an answer and for a turn before a state without an anchor. means="all": the own visit
    counts, too, as published. A state is an anchor id of a prompt, as in gigpo; algorithm.turn_anchor=hidden clusters the
    policy's hidden states, as the paper does.
    """
    norm_by = gigpo.norm_options("mean_norm", 0.0, EPS)
    episode_B_K1, _ = gigpo.episode_advantage(tables, released=False, **norm_by)
    return_B_K1 = tables.return_to_go(tables.reward_B_K1(), gamma)
    state_B_K1, visit_B_K1 = gigpo.state_visits(tables)
    ends_B = torch.full_like(tables.n_tool_turns_B, -1)
    next_B_K1 = tables.next_value(tables.anchor_B_K1, ends_B)
    row_B_K1 = torch.arange(len(ends_B), device=ends_B.device)[:, None].expand_as(state_B_K1)

    def mean(of_B_K1, member_B_K1):
        """(mean return of the members, whether there are any)"""
        sums = []
        for group_B_K1 in (of_B_K1, gigpo.joined(of_B_K1, row_B_K1)):
            given = return_B_K1.flatten(), group_B_K1.flatten()
            stats = group_stats(*given, member_N=member_B_K1.flatten())
            sums.append((stats.mean_N * stats.count_N, stats.count_N))
        (sum_N, count_N), (own_sum_N, own_N) = sums
        if means == "others":
            sum_N, count_N = sum_N - own_sum_N, count_N - own_N
        return (sum_N / count_N.clamp(min=1)).view_as(return_B_K1), (count_N > 0).view_as(member_B_K1)

    value_B_K1, known_B_K1 = mean(state_B_K1, visit_B_K1)
    action_B_K1, taken_B_K1 = mean(gigpo.joined(state_B_K1, next_B_K1), visit_B_K1 & (next_B_K1 != -1))
    action_B_K1 = torch.where(taken_B_K1 & (next_B_K1 != -1), action_B_K1, return_B_K1)
    step_B_K1 = torch.where(visit_B_K1 & known_B_K1, action_B_K1 - value_B_K1, 0.0)
    outcome_B = tables.outcome_advantage("grpo", ddof=1, **norm_by)
    known_B_1 = tables.known_B[:, None]
    advantage_B_K1 = torch.where(known_B_1, episode_B_K1 + step_weight * step_B_K1, outcome_B[:, None])
    return *tables.split(advantage_B_K1), tables.ones()
