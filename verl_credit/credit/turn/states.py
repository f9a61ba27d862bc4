"""What GiGPO and HGPO share: a trajectory's total reward among its prompt's, and visits of the same state."""

import torch

from verl_credit.credit.groups import group_stats, over_std
from verl_credit.credit.turn.tables import Tables


def compared(
    value_B_K1: torch.Tensor,
    group_B_K1: torch.Tensor,
    member_B_K1: torch.Tensor,
    rounding_B_K1: torch.Tensor,
    *,
    released: bool,
    norm_by_std: bool,
    ddof: int,
    variance_floor: float,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
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
        for place_m in place_n.split(sizes):  # one group
            value_m = value_N[place_m].float()
            deviation_N[place_m] = (value_m - value_m.mean()).double()
            std_N[place_m] = (value_m.var(correction=ddof) + variance_floor).sqrt().double()
    z_N = over_std(deviation_N, std_N, eps) if norm_by_std else deviation_N
    return z_N.view_as(value_B_K1), several_N.view_as(member_B_K1)


def ties(
    deviation_N: torch.Tensor, group_N: torch.Tensor, member_N: torch.Tensor, rounding_N: torch.Tensor
) -> torch.Tensor:
    """True in groups where no member is further from the mean than the largest rounding. group_N: below N."""
    zeros_G = deviation_N.new_zeros(len(deviation_N))
    furthest_G, allowed_G = (
        zeros_G.scatter_reduce(0, group_N, torch.where(member_N, x_N, 0.0), "amax")
        for x_N in (deviation_N.abs(), rounding_N)
    )
    return (furthest_G <= allowed_G)[group_N]


def episode_advantage(tables: Tables, *, released: bool, **norm) -> tuple[torch.Tensor, torch.Tensor]:
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


def state_visits(tables: Tables) -> tuple[torch.Tensor, torch.Tensor]:
    """(state_B_K1, member_B_K1): equal numbers are visits of the same state of the same prompt.

    Members are the turns of rows whose rewards are all known, where they have an anchor.
    """
    member_B_K1 = tables.turn_B_K1 & tables.known_B[:, None] & (tables.anchor_B_K1 != -1)
    return joined(tables.group_B[:, None].expand_as(member_B_K1), tables.anchor_B_K1), member_B_K1


def joined(first_B_K: torch.Tensor, second_B_K: torch.Tensor) -> torch.Tensor:
    """Numbers of pairs: equal where both are equal."""
    pair_N = torch.stack([first_B_K.flatten(), second_B_K.flatten()], dim=1)
    return torch.unique(pair_N, dim=0, return_inverse=True)[1].view_as(first_B_K)
