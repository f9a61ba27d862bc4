"""gigpo: a trajectory's total reward compared per prompt, plus what it earned from a state on, compared per state."""

from typing import Literal

import torch

from verl_credit.credit.groups import EPS, group_stats, over_std
from verl_credit.credit.turn.mode import ModeOutput, TurnMode
from verl_credit.credit.turn.options import AtLeastZero, Positive, Share, refuse_unread
from verl_credit.credit.turn.states import compared, episode_advantage, state_visits, ties
from verl_credit.credit.turn.tables import Tables


def gigpo(
    tables: Tables,
    *,
    gamma: Share = 1.0,
    norm: Literal["mean_norm", "mean_std_norm"] = "mean_norm",
    step_weight: AtLeastZero = 1.0,
    visits: Literal["all", "first"] = "all",
    variance_floor: AtLeastZero = 0.0,
    eps: Positive = EPS,
    parity: Literal["none", "released"] = "none",
) -> ModeOutput:
    """Compares what a trajectory earned per prompt, and what it earned from a state on per state.

        A_k = z(R among the prompt's trajectories) + step_weight z(G_k among the visits of the same state)
        R = sum of a row's rewards, G_k = sum over j >= k of gamma^(j-k) r_j, the answer turn's r is the outcome
        z(x) = x - mean with norm="mean_norm", over std + eps (ddof 1) with norm="mean_std_norm"

    A state is an anchor id of a prompt; every visit is a member, several of one trajectory, too, at any turn. Later
    visits of a loop then look better than earlier ones. visits="first": only a trajectory's first visit is a member; its
    later visits are measured against the same mean, and get 0 with "mean_std_norm" where the first visits have no spread. A
    turn without an anchor, or alone in its state, has no second term.
    A trajectory with a lost or a missing turn reward is no member and reads its outcome's advantage alone
    (`Tables.missing_reward_B_K`).
    Released defects that are not here: statistics of R weighed by the number of turns, so that long failures pull the
    baseline; the plain R for a prompt of one turn; a rounding residue over 1e-6 where rewards tie. parity="released"
    brings them back. Others are the trainer's (copied rows in the statistics, the penalty for invalid actions) or the
    anchors' (`turn.anchors`).
    """
    if parity == "released" and visits == "first":
        raise ValueError(f"visits={visits!r} with parity={parity!r}: released code counts all visits")
    if norm == "mean_norm":
        unread = {"variance_floor": (variance_floor, 0.0), "eps": (eps, EPS)}
        refuse_unread(f"norm={norm!r}", "there is no std to divide by", **unread)
    norm_by = {"norm_by_std": norm == "mean_std_norm", "variance_floor": variance_floor, "eps": eps}
    released = parity == "released"
    episode_B_K1, _ = episode_advantage(tables, released=released, **norm_by)
    state_B_K1, visit_B_K1 = state_visits(tables)
    return_B_K1 = tables.return_to_go(tables.reward_B_K1(), gamma)
    visited = return_B_K1, state_B_K1, visit_B_K1, tables.rounding(gamma)
    if visits == "all":
        step_B_K1, _ = compared(*visited, released=released, ddof=1, **norm_by)
    else:
        step_B_K1 = _against_first_visits(*visited, **norm_by)
    outcome_B = tables.outcome_advantage("grpo", ddof=1, **norm_by)
    known_B_1 = tables.known_B[:, None]
    advantage_B_K1 = torch.where(known_B_1, episode_B_K1 + step_weight * step_B_K1, outcome_B[:, None])
    return *tables.split(advantage_B_K1), tables.ones()


def _against_first_visits(
    return_B_K1, state_B_K1, visit_B_K1, rounding_B_K1, *, norm_by_std, variance_floor, eps
) -> torch.Tensor:
    same_B_K1_K1 = (state_B_K1[:, :, None] == state_B_K1[:, None, :]) & visit_B_K1[:, None, :]
    first_B_K1 = visit_B_K1 & ~same_B_K1_K1.tril(-1).any(dim=2)
    stats = group_stats(
        return_B_K1.flatten(),
        state_B_K1.flatten(),
        member_N=first_B_K1.flatten(),
        ddof=1,
        variance_floor=variance_floor,
    )
    later_N = (visit_B_K1 & ~first_B_K1).flatten() & (stats.count_N > 1)
    tied_N = ties(stats.deviation_N, state_B_K1.flatten(), first_B_K1.flatten(), rounding_B_K1.flatten())
    value_N = torch.where(tied_N, 0.0, stats.deviation_N)
    value_N = torch.where(later_N, return_B_K1.flatten() - stats.mean_N, value_N)
    if norm_by_std:
        value_N = torch.where(tied_N, 0.0, over_std(value_N, stats.std_N, eps))
    return value_N.view_as(return_B_K1)


BEYOND_OUTCOMES = "visits of a state are compared without turn rewards, too"
BY_DISTANCE = (
    "with gamma below 1, visits of a state at different distances from the end differ where outcomes tie"
)
BY_VISITS = (
    "a better outcome raises every visit of its trajectory, and beside the others one of them can fall"
)

MODE = TurnMode(
    name="gigpo",
    function=gigpo,
    reads=("rewards", "groups", "gains", "anchors"),
    needs=("anchor_B_K1",),
    default_signal="none",
    reduces_to="centred GRPO on the sum of rewards at step_weight 0",
    bias="own sample in both means; the visits of a state depend on the policy; a trajectory that misses a turn's "
    "reward is no member and reads its outcome alone",
    departures=(
        "each trajectory counts once in the prompt's mean and std; groups of one give 0; ties give 0; parity=released: as "
        "released"
    ),
    source="2505.10978; langfengQ/verl-agent",
    whole_returns=True,
    exempt={"ties": BY_DISTANCE, "better_tools": BY_VISITS, "no_gains": BEYOND_OUTCOMES},
)
