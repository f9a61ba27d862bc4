"""Statistics of groups and rows. Mean, spread, floors and the rule for groups of one are defined only here.

All comparisons within a group (outcomes of one prompt, gains of one prompt and turn, a whole batch) use
`group_stats`, in float64.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from verl_credit.credit.arguments import as_bool, as_group_ids, check_dims, check_shape, refuse_rows
from verl_credit.lazy import torch

VARIANCE_FLOOR = 1e-8  # released A2TGPO: std = sqrt(var + 1e-8)
SOLVED_ABOVE = 0.5  # a row is solved if its outcome is above it
EPS = 1e-6  # released A2TGPO and verl: divide by (std + 1e-6)


@dataclass(frozen=True)
class GroupStats:
    """The statistics of each element's group, in float64.

    Elements that are not members have deviation 0, and the mean, std and count of their group's members.
    """

    mean_N: torch.Tensor
    std_N: torch.Tensor
    count_N: torch.Tensor
    deviation_N: torch.Tensor  # value - mean; exactly 0 where all members of the group are equal


def group_stats(
    values_N: torch.Tensor,
    group_N: torch.Tensor,
    *,
    member_N: torch.Tensor | None = None,
    ddof: int = 0,
    variance_floor: float = VARIANCE_FLOOR,
) -> GroupStats:
    """Mean and standard deviation of each element's group, in float64.

        mean = sum(v) / n        std = sqrt(sum((v - mean)^2) / (n - ddof) + variance_floor)

    A group with `n <= max(1, ddof)` members has no spread: its std is 1, and since a single member has deviation 0,
    its z-score is 0.
    Sums run over the members of a group in the order of their values, so permuting rows changes no bit of the
    result. Values are measured from the group's minimum, so equal values deviate by exactly 0.

    Shapes: values_N any real dtype, group_N integer ids (any values), member_N bool (all, if None).
    Values of non-members may be anything, NaN included.
    """
    check_shape("group_N", group_N, values_N.shape, "values_N")
    group_N = as_group_ids("group_N", group_N)
    values_N = values_N.to(torch.float64)
    if member_N is None:
        member_N = torch.ones_like(group_N, dtype=torch.bool)
    check_shape("member_N", member_N, values_N.shape, "values_N")
    n_groups = values_N.numel()  # an upper bound; reading the ids would wait for the device

    values_n, group_n = in_canonical_order(values_N[member_N], group_N[member_N])
    zeros_G = values_N.new_zeros(n_groups)
    origin_G = zeros_G.scatter_reduce(0, group_n, values_n, "amin", include_self=False)
    count_G = zeros_G.index_add(0, group_n, torch.ones_like(values_n))
    shifted_n = values_n - origin_G[group_n]
    mean_G = zeros_G.index_add(0, group_n, shifted_n) / count_G.clamp(min=1)
    square_G = zeros_G.index_add(0, group_n, (shifted_n - mean_G[group_n]) ** 2)
    std_G = (square_G / (count_G - ddof).clamp(min=1) + variance_floor).sqrt()
    std_G = torch.where(count_G > max(1, ddof), std_G, torch.ones_like(std_G))

    deviation_N = torch.where(member_N, values_N - origin_G[group_N] - mean_G[group_N], 0.0)
    return GroupStats((origin_G + mean_G)[group_N], std_G[group_N], count_G[group_N], deviation_N)


def z_score(
    values_N: torch.Tensor,
    group_N: torch.Tensor,
    *,
    member_N: torch.Tensor | None = None,
    norm_by_std: bool = True,
    ddof: int = 0,
    variance_floor: float = VARIANCE_FLOOR,
    eps: float = EPS,
) -> torch.Tensor:
    """(value - mean) / (std + eps) within groups, float64; value - mean if not `norm_by_std`.

    Exactly 0 for equal values whatever eps is, for groups of one and for elements that are not members.
    """
    stats = group_stats(values_N, group_N, member_N=member_N, ddof=ddof, variance_floor=variance_floor)
    if not norm_by_std:
        return stats.deviation_N
    return over_std(stats.deviation_N, stats.std_N, eps)


def z_score_per_turn(
    values_B_K: torch.Tensor, member_B_K: torch.Tensor, group_B: torch.Tensor, **options
) -> torch.Tensor:
    """`z_score` with one group per prompt and tool turn; float64. group_B: 0, 1, ..."""
    turns = values_B_K.shape[1]
    group_B_K = group_B[:, None] * turns + torch.arange(turns, device=values_B_K.device)
    z_N = z_score(values_B_K.flatten(), group_B_K.flatten(), member_N=member_B_K.flatten(), **options)
    return z_N.view_as(values_B_K)


def minus_others(values_N: torch.Tensor, group_N: torch.Tensor, member_N: torch.Tensor) -> torch.Tensor:
    """value - mean of the group's other members = n / (n - 1) (value - mean of all), float64.

    Exactly 0 for equal values, for a single member and for elements that are not members.
    """
    stats = group_stats(values_N, group_N, member_N=member_N)
    return torch.where(
        stats.count_N > 1, stats.deviation_N * stats.count_N / (stats.count_N - 1).clamp(min=1), 0.0
    )


def over_std(deviation_N: torch.Tensor, std_N: torch.Tensor, eps: float) -> torch.Tensor:
    """deviation / (std + eps); equal values, whose deviation is 0, give 0 without an eps too."""
    denominator_N = std_N + eps
    return deviation_N / torch.where(denominator_N > 0, denominator_N, 1.0)


def z_score_of_one(values: torch.Tensor, member: torch.Tensor, *, eps: float = EPS) -> torch.Tensor:
    """`z_score` where all members are one group, whatever the shape; population std without a floor, float64.

    No sort, which takes most of `group_stats`' time: the order of the members may change the last bits.
    """
    count = member.sum()
    values = values.to(torch.float64)
    shifted = torch.where(member, values - torch.where(member, values, torch.inf).amin(), 0.0)
    deviation = torch.where(member, shifted - shifted.sum() / count, 0.0)
    std = torch.where(count > 1, (deviation.square().sum() / count).sqrt(), 1.0)
    return over_std(deviation, std, eps)


def row_mean(values_B_T: torch.Tensor, member_B_T: torch.Tensor) -> torch.Tensor:
    """Mean over the members of each row, float64 [B, 1]; 0 for a row without members. Non-members may be anything."""
    values_B_T = torch.where(member_B_T, values_B_T.to(torch.float64), 0.0)
    return values_B_T.sum(dim=1, keepdim=True) / member_B_T.sum(dim=1, keepdim=True).clamp(min=1)


def in_canonical_order(values_n: torch.Tensor, group_n: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Sorted by group, then by value, so that a sum over a group does not depend on the order of the rows."""
    by_value = torch.argsort(values_n)
    by_group = by_value[torch.argsort(group_n[by_value], stable=True)]
    return values_n[by_group], group_n[by_group]


CACHED_TOKENS = 1 << 17


def row_chunks(table_B_T: torch.Tensor) -> Iterator[slice]:
    """Slices of rows, in order, at least one: on a CPU as many rows as fit its caches, elsewhere all."""
    rows, width = table_B_T.shape
    step = max(1, CACHED_TOKENS // max(width, 1)) if table_B_T.device.type == "cpu" else max(rows, 1)
    for first in range(0, max(rows, 1), step):
        yield slice(first, min(first + step, rows))


def group_counts(
    outcome_B: torch.Tensor,
    group_B: torch.Tensor,
    *,
    row_valid_B: torch.Tensor | None = None,
    group_size: int | None = None,
) -> dict[str, int]:
    """The number of groups, and of those without an outcome signal.

    groups; singleton_groups (one valid row); tied_groups (two or more valid rows, all outcomes equal), split into
    all_solved_groups (outcome above `SOLVED_ABOVE`) and all_failed_groups; short_groups (fewer valid rows than
    `group_size`, if given; a group without a valid row counts only here).
    """
    valid_B = valid_rows(outcome_B, group_B, row_valid_B) & outcome_B.isfinite()
    group_B = as_group_ids("group_B", group_B)
    n_groups = int(group_B.max()) + 1 if group_B.numel() else 0
    outcome_b, group_b = outcome_B[valid_B].to(torch.float64), group_B[valid_B]
    zeros_G = torch.zeros(n_groups, dtype=torch.float64, device=outcome_B.device)
    size_G = zeros_G.index_add(0, group_b, torch.ones_like(outcome_b))
    low_G = zeros_G.scatter_reduce(0, group_b, outcome_b, "amin", include_self=False)
    high_G = zeros_G.scatter_reduce(0, group_b, outcome_b, "amax", include_self=False)
    tied_G = (size_G > 1) & (low_G == high_G)
    counts = {
        "groups": int((size_G > 0).sum()),
        "singleton_groups": int((size_G == 1).sum()),
        "tied_groups": int(tied_G.sum()),
        "all_solved_groups": int((tied_G & (low_G > SOLVED_ABOVE)).sum()),
        "all_failed_groups": int((tied_G & (low_G <= SOLVED_ABOVE)).sum()),
    }
    if group_size is not None:
        counts["short_groups"] = int((size_G < group_size).sum())
    return counts


def tied_rows(outcome_B: torch.Tensor, group_B: torch.Tensor, member_B: torch.Tensor) -> torch.Tensor:
    """True for the members of groups of two or more whose outcomes are all equal."""
    stats = group_stats(outcome_B, group_B, member_N=member_B, variance_floor=0.0)
    return member_B & (stats.count_N > 1) & (stats.std_N == 0)


def finite_rows(
    outcome_B: torch.Tensor, group_B: torch.Tensor, row_valid_B: torch.Tensor | None
) -> torch.Tensor:
    """`valid_rows`, after checking that their outcomes are finite."""
    valid_B = valid_rows(outcome_B, group_B, row_valid_B)
    bad_B = valid_B & ~outcome_B.isfinite()
    refuse_rows("outcome_B", bad_B, "is {value}; expected a finite outcome", outcome_B)
    return valid_B


def valid_rows(
    outcome_B: torch.Tensor, group_B: torch.Tensor, row_valid_B: torch.Tensor | None
) -> torch.Tensor:
    """`row_valid_B` as bool (all True, if None), after checking that the three shapes agree."""
    check_dims("outcome_B", outcome_B, 1, "one outcome per row")
    check_shape("group_B", group_B, outcome_B.shape, "outcome_B")
    if row_valid_B is None:
        return torch.ones(outcome_B.shape, dtype=torch.bool, device=outcome_B.device)
    check_shape("row_valid_B", row_valid_B, outcome_B.shape, "outcome_B")
    return as_bool("row_valid_B", row_valid_B)
