"""GAGPO: advantages over turns from mean returns of equal states, compared within the prompt.

Paper: 2605.13217. Departures: there is no release; lam .8 is a public adaptation's, the paper's was not read.
Exact bias: own sample in the values, so that a turn from a state that no other trajectory came to has advantage 0 until the
paths meet; at lam below 1 that of the values; a trajectory that misses a turn's reward reads its outcome alone.
Own cosine: .981 in the exact world; minus GRPO's on the lab's policies +.018 ± .019.
Area over GRPO: -0.4 ± 1.1 points at two searches, -0.7 ± 1.9 at four (16 pairs each).
Commit: 23dae403 had it in verl_credit.credit.
"""

from typing import Literal

import torch

from verl_credit.credit import EPS, AtLeastZero, Positive, Share, Tables, group_stats, z_score


def gagpo(
    tables: Tables,
    *,
    gamma: Share = 1.0,
    lam: Share = 0.8,
    norm: Literal["mean_norm", "mean_std_norm"] = "mean_std_norm",
    variance_floor: AtLeastZero = 0.0,
    eps: Positive = EPS,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Estimates advantages over turns from mean returns of equal states, and compares them within the prompt.

        A_k = z(a_k among all turns of the prompt), a_k = delta_k + gamma lam a_(k+1)
        delta_k = r_k + gamma V_(k+1) - V_k, V_k = mean of G over the visits of state k, V after the answer: 0
        G_k = sum over j >= k of gamma^(j-k) r_j, the answer turn's r is the outcome

    z(x) = x - mean with norm="mean_norm", over std + eps (ddof 1) with norm="mean_std_norm". With lam 1 and "mean_norm" it
    is gigpo's second term. A turn without an anchor has its own return as value. A trajectory with a lost or a missing turn
    reward is no member and reads its outcome's advantage alone.
    """
    if norm == "mean_norm" and (variance_floor != 0 or eps != EPS):
        unread = (
            f"variance_floor={variance_floor!r}, eps={eps!r} with norm={norm!r}: there is no std to divide by"
        )
        raise ValueError(f"{unread}; leave them at 0.0 and {EPS!r}")
    norm_by = {"norm_by_std": norm == "mean_std_norm", "variance_floor": variance_floor, "eps": eps}
    reward_B_K1 = tables.reward_B_K1()
    value_B_K1 = _state_values(tables, tables.return_to_go(reward_B_K1, gamma))
    next_B_K1 = tables.next_value(value_B_K1, torch.zeros_like(tables.outcome_B))
    delta_B_K1 = torch.where(tables.turn_B_K1, reward_B_K1 + gamma * next_B_K1 - value_B_K1, 0.0)
    advantage_B_K1 = tables.return_to_go(delta_B_K1, gamma * lam)

    member_B_K1 = tables.turn_B_K1 & tables.known_B[:, None]
    group_N, member_N = tables.group_B[:, None].expand_as(member_B_K1).flatten(), member_B_K1.flatten()
    z_N = z_score(advantage_B_K1.flatten(), group_N, member_N=member_N, ddof=1, **norm_by)
    rounding_B_K1 = 4 * member_B_K1.shape[1] * tables.rounding(1.0)
    z_N = torch.where(_ties(advantage_B_K1.flatten(), group_N, member_N, rounding_B_K1.flatten()), 0.0, z_N)

    outcome_B = tables.outcome_advantage("grpo", ddof=1, **norm_by)
    advantage_B_K1 = torch.where(tables.known_B[:, None], z_N.view_as(delta_B_K1), outcome_B[:, None])
    return *tables.split(advantage_B_K1), tables.ones()


gagpo.reads = ("rewards", "groups", "gains", "anchors")
gagpo.needs = ("anchor_B_K1",)
gagpo.default_signal = "none"
gagpo.whole_returns = True
gagpo.exempt = {
    "ties": "with gamma below 1, visits of a state at different distances from the end differ where outcomes tie",
    "better": "a better outcome raises the value of its trajectory's states, and a turn from one can fall",
}


def _state_values(tables: Tables, return_B_K1: torch.Tensor) -> torch.Tensor:
    """The mean return of all visits of a turn's state; a turn without an anchor has its own return."""
    visit_B_K1 = tables.turn_B_K1 & tables.known_B[:, None] & (tables.anchor_B_K1 != -1)
    group_B_K1 = tables.group_B[:, None].expand_as(visit_B_K1)
    pair_N = torch.stack([group_B_K1.flatten(), tables.anchor_B_K1.flatten()], dim=1)
    state_N = torch.unique(pair_N, dim=0, return_inverse=True)[1]
    mean_N = group_stats(return_B_K1.flatten(), state_N, member_N=visit_B_K1.flatten()).mean_N
    value_B_K1 = torch.where(visit_B_K1, mean_N.view_as(return_B_K1), return_B_K1)
    return torch.where(tables.turn_B_K1, value_B_K1, 0.0)


def _ties(value_N, group_N, member_N, rounding_N) -> torch.Tensor:
    """True in prompts where no turn is further from the mean than rounding can bring it."""
    deviation_N = group_stats(value_N, group_N, member_N=member_N, ddof=1).deviation_N
    zeros_G = deviation_N.new_zeros(len(deviation_N))
    furthest_G, allowed_G = (
        zeros_G.scatter_reduce(0, group_N, torch.where(member_N, x_N, 0.0), "amax")
        for x_N in (deviation_N.abs(), rounding_N)
    )
    return (furthest_G <= allowed_G)[group_N]
