"""Statistics of execution and planning tokens over a whole batch."""

import torch

from verl_credit.credit.checks import as_bool, check_shape
from verl_credit.credit.chunks import row_chunks


def entropy_stats(
    uncertainty_B_T: torch.Tensor, planning_B_T: torch.Tensor | None, mask_B_T: torch.Tensor
) -> dict[str, torch.Tensor]:
    """exec_mean, exec_var, exec_count, plan_mean, plan_var, plan_count: 0-dim float64.

    exec: policy tokens without planning (all, without a planning mask); plan: planning tokens. Every token of the batch
    counts once (not a mean of means); the variance is the population's, from deviations in float64. A kind without tokens
    gives three zeros. Values outside the mask may be anything.
    """
    check_shape("mask_B_T", mask_B_T, uncertainty_B_T.shape, "uncertainty_B_T")
    mask_B_T = as_bool("mask_B_T", mask_B_T)
    if planning_B_T is not None:
        check_shape("planning_B_T", planning_B_T, uncertainty_B_T.shape, "uncertainty_B_T")
        planning_B_T = as_bool("planning_B_T", planning_B_T)
    return stats_of_rows(
        [
            row_moments(
                torch.where(mask_B_T[rows], uncertainty_B_T[rows], 0.0),
                None if planning_B_T is None else planning_B_T[rows],
                mask_B_T[rows],
            )
            for rows in row_chunks(mask_B_T)
        ]
    )


def row_moments(
    uncertainty_B_T: torch.Tensor, planning_B_T: torch.Tensor | None, mask_B_T: torch.Tensor
) -> torch.Tensor:
    """[B, 2, 3], float64: number, sum, and squared deviations from the row's mean, of execution and planning tokens.

    ``uncertainty_B_T`` is 0 outside the mask.
    """
    value_B_T = uncertainty_B_T.detach().to(torch.float64)
    kinds = [mask_B_T] if planning_B_T is None else [mask_B_T & ~planning_B_T, mask_B_T & planning_B_T]
    moments_B_2_3 = value_B_T.new_zeros(len(value_B_T), 2, 3)
    for kind, member_B_T in enumerate(kinds):
        share_B_T = member_B_T.double()  # a product takes a quarter of `where`'s time on a mask of short runs
        count_B = share_B_T.sum(dim=1)
        sum_B = (value_B_T * share_B_T).sum(dim=1)
        mean_B_1 = (sum_B / count_B.clamp(min=1))[:, None]
        square_B = (value_B_T - mean_B_1).mul_(share_B_T).square_().sum(dim=1)
        moments_B_2_3[:, kind] = torch.stack([count_B, sum_B, square_B], dim=1)
    return moments_B_2_3


def stats_of_rows(moments: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """`entropy_stats` of the rows whose `row_moments` these are, at least one table."""
    stats = {}
    count_B_2, sum_B_2, square_B_2 = torch.cat(moments).unbind(dim=2)
    for kind, name in enumerate(("exec", "plan")):
        count_B, sum_B = count_B_2[:, kind], sum_B_2[:, kind]
        count = count_B.sum()
        mean = sum_B.sum() / count.clamp(min=1)
        between_B = count_B * (sum_B / count_B.clamp(min=1) - mean) ** 2
        variance = (square_B_2[:, kind] + between_B).sum() / count.clamp(min=1)
        stats |= {f"{name}_mean": mean, f"{name}_var": variance, f"{name}_count": count}
    return stats
