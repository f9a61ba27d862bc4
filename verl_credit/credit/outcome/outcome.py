"""The rows and groups that outcome operators compare."""

import torch

from verl_credit.credit.checks import as_bool, as_group_ids, check_shape, check_tensor, first_row
from verl_credit.credit.groups import group_stats


def group_counts(
    outcome_B: torch.Tensor,
    group_B: torch.Tensor,
    *,
    row_valid_B: torch.Tensor | None = None,
    group_size: int | None = None,
    solved_above: float = 0.5,
) -> dict[str, int]:
    """The number of groups, and of those without an outcome signal.

    groups; singleton_groups (one valid row); tied_groups (two or more valid rows, all outcomes equal), split into
    all_solved_groups (outcome above `solved_above`) and all_failed_groups; short_groups (fewer valid rows than
    `group_size`, if given; a group without a valid row counts only here).
    """
    valid_B = valid_rows(outcome_B, group_B, row_valid_B)
    valid_B = valid_B & outcome_B.isfinite()
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
        "all_solved_groups": int((tied_G & (low_G > solved_above)).sum()),
        "all_failed_groups": int((tied_G & (low_G <= solved_above)).sum()),
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
    if bad_B.any():
        row = first_row(bad_B)
        raise ValueError(f"outcome_B row {row} is {float(outcome_B[row])}; expected a finite outcome")
    return valid_B


def valid_rows(
    outcome_B: torch.Tensor, group_B: torch.Tensor, row_valid_B: torch.Tensor | None
) -> torch.Tensor:
    """`row_valid_B` as bool (all True, if None), after checking that the three shapes agree."""
    check_tensor("outcome_B", outcome_B)
    if outcome_B.dim() != 1:
        raise ValueError(f"outcome_B has shape {tuple(outcome_B.shape)}; expected one outcome per row")
    check_shape("group_B", group_B, outcome_B.shape, "outcome_B")
    if row_valid_B is None:
        return torch.ones(outcome_B.shape, dtype=torch.bool, device=outcome_B.device)
    check_shape("row_valid_B", row_valid_B, outcome_B.shape, "outcome_B")
    return as_bool("row_valid_B", row_valid_B)
