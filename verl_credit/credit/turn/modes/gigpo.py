"""gigpo and hgpo: what a trajectory earned from a turn on, compared among visits of the same state of the prompt."""

from typing import Literal

from verl_credit.credit.arguments import given
from verl_credit.credit.groups import EPS, group_stats, over_std
from verl_credit.credit.operator import AtLeastZero, Count, Number, Positive, Share, refuse_unread
from verl_credit.credit.turn.mode import ModeOutput, turn_mode
from verl_credit.credit.turn.tables import Tables
from verl_credit.lazy import torch

BEYOND_OUTCOMES = "visits of a state are compared without turn rewards, too"
BY_DISTANCE = (
    "with gamma below 1, visits of a state at different distances from the end differ where outcomes tie"
)
BY_VISITS = (
    "a better outcome raises every visit of its trajectory, and beside the others one of them can fall"
)
BY_OWN_VISITS = (
    "where a trajectory comes to a state twice, a better outcome raises both visits and the std that divides them, and "
    "either can fall, the answer, too; where it comes to each state once, none falls"
)


@turn_mode(
    name="gigpo",
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
    norm_by = norm_options(norm, variance_floor, eps)
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
) -> "torch.Tensor":
    same_B_K1_K1 = (state_B_K1[:, :, None] == state_B_K1[:, None, :]) & visit_B_K1[:, None, :]
    first_B_K1 = visit_B_K1 & ~same_B_K1_K1.tril(-1).any(dim=2)
    return_N, state_N, first_N = return_B_K1.flatten(), state_B_K1.flatten(), first_B_K1.flatten()
    stats = group_stats(return_N, state_N, member_N=first_N, ddof=1, variance_floor=variance_floor)
    later_N = visit_B_K1.flatten() & ~first_N & (stats.count_N > 1)
    tied_N = ties(stats.deviation_N, state_N, first_N, rounding_B_K1.flatten())
    value_N = torch.where(tied_N, 0.0, stats.deviation_N)
    value_N = torch.where(later_N, return_N - stats.mean_N, value_N)
    if norm_by_std:
        value_N = torch.where(tied_N, 0.0, over_std(value_N, stats.std_N, eps))
    return value_N.view_as(return_B_K1)


def norm_options(norm: str, variance_floor: float, eps: float) -> dict:
    """The options of `compared`. Raises ValueError for an option of the std where nothing is divided by it."""
    if norm == "mean_norm":
        unread = {"variance_floor": (variance_floor, 0.0), "eps": (eps, EPS)}
        refuse_unread(f"norm={norm!r}", "there is no std to divide by", **unread)
    return {"norm_by_std": norm == "mean_std_norm", "variance_floor": variance_floor, "eps": eps}


def episode_advantage(tables: Tables, *, released: bool, **norm) -> tuple["torch.Tensor", "torch.Tensor"]:
    """`compared` for R_b, the sum of a row's rewards, over the prompt with ddof 1, in every column.

    Each trajectory counts once, and groups of one give 0. ``released``: it counts once per turn, and a prompt of one turn
    in all gets R_b itself.
    """
    total_B_K1 = tables.reward_B_K1().sum(dim=1, keepdim=True).expand_as(tables.turn_B_K1)
    group_B_K1 = tables.group_B[:, None].expand_as(tables.turn_B_K1)
    member_B_K1 = tables.known_B[:, None] & (tables.turn_B_K1 if released else tables.is_answer_B_K1)
    rounding_B_K1 = tables.rounding(1.0)[:, :1].expand_as(tables.turn_B_K1)
    z_B_K1, several_B_K1 = compared(
        total_B_K1, group_B_K1, member_B_K1, rounding_B_K1, released=released, ddof=1, **norm
    )
    if released:
        z_B_K1 = torch.where(member_B_K1 & ~several_B_K1, total_B_K1, z_B_K1)
    at_answer = tables.n_tool_turns_B[:, None].expand_as(z_B_K1)
    return z_B_K1.gather(1, at_answer), several_B_K1.gather(1, at_answer)


def state_visits(tables: Tables) -> tuple["torch.Tensor", "torch.Tensor"]:
    """(state_B_K1, member_B_K1): equal numbers are visits of the same state of the same prompt.

    Members are the turns of rows whose rewards are all known, where they have an anchor.
    """
    anchor_B_K1 = given("anchor_B_K1", tables.anchor_B_K1)
    member_B_K1 = tables.turn_B_K1 & tables.known_B[:, None] & (anchor_B_K1 != -1)
    return joined(tables.group_B[:, None].expand_as(member_B_K1), anchor_B_K1), member_B_K1


def joined(first_B_K: "torch.Tensor", second_B_K: "torch.Tensor") -> "torch.Tensor":
    """Numbers of pairs: equal where both are equal."""
    pair_N = torch.stack([first_B_K.flatten(), second_B_K.flatten()], dim=1)
    return torch.unique(pair_N, dim=0, return_inverse=True)[1].view_as(first_B_K)


def compared(
    value_B_K1: "torch.Tensor",
    group_B_K1: "torch.Tensor",
    member_B_K1: "torch.Tensor",
    rounding_B_K1: "torch.Tensor",
    *,
    released: bool,
    norm_by_std: bool,
    ddof: int,
    variance_floor: float,
    eps: float,
) -> tuple["torch.Tensor", "torch.Tensor"]:
    """(z, True where the group has several members), z as in `groups.z_score`, and 0 where the members tie.

    ``rounding_B_K1``: how far values may be apart that are equal but for rounding (`Tables.rounding`).
    ``released``: no such tie, and in float32, where the mean of equal values leaves a residue that eps divides.
    """
    value_N, group_N, member_N = value_B_K1.flatten(), group_B_K1.flatten(), member_B_K1.flatten()
    stats = group_stats(value_N, group_N, member_N=member_N, ddof=ddof, variance_floor=variance_floor)
    several_N = member_N & (stats.count_N > 1)
    deviation_N, std_N = stats.deviation_N, stats.std_N
    if not released:
        tied_N = ties(deviation_N, group_N, member_N, rounding_B_K1.flatten())
        deviation_N = torch.where(tied_N, 0.0, deviation_N)
    else:
        place_n = several_N.nonzero().flatten()
        place_n = place_n[torch.argsort(group_N[place_n], stable=True)]
        sizes = group_N[place_n].unique_consecutive(return_counts=True)[1].tolist()
        for place_m in place_n.split(sizes):  # each has the places of a group
            value_m = value_N[place_m].float()
            deviation_N[place_m] = (value_m - value_m.mean()).double()
            std_N[place_m] = (value_m.var(correction=ddof) + variance_floor).sqrt().double()
    z_N = over_std(deviation_N, std_N, eps) if norm_by_std else deviation_N
    return z_N.view_as(value_B_K1), several_N.view_as(member_B_K1)


def ties(
    deviation_N: "torch.Tensor", group_N: "torch.Tensor", member_N: "torch.Tensor", rounding_N: "torch.Tensor"
) -> "torch.Tensor":
    """True in groups where no member is further from the mean than the largest rounding. group_N: below N."""
    zeros_G = deviation_N.new_zeros(len(deviation_N))
    furthest_G, allowed_G = (
        zeros_G.scatter_reduce(0, group_N, torch.where(member_N, x_N, 0.0), "amax")
        for x_N in (deviation_N.abs(), rounding_N)
    )
    return (furthest_G <= allowed_G)[group_N]


@turn_mode(
    name="hgpo",
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
    exempt={"ties": BY_DISTANCE, "better": BY_OWN_VISITS, "no_gains": BEYOND_OUTCOMES},
)
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
    A trajectory that comes to a state twice is compared with itself: a better outcome can then lower its answer's z.
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


def _after(table_B_K1: "torch.Tensor") -> "torch.Tensor":
    """Each turn's entry at the next turn; 0 at the first."""
    return torch.nn.functional.pad(table_B_K1[:, :-1], (1, 0))
