"""Statistics of execution and planning tokens over a whole batch."""

import torch

from verl_credit.credit.checks import as_bool, check_shape


def entropy_stats(
    uncertainty_B_T: torch.Tensor, planning_B_T: torch.Tensor, mask_B_T: torch.Tensor
) -> dict[str, torch.Tensor]:
    """exec_mean, exec_var, exec_count, plan_mean, plan_var, plan_count: 0-dim float64.

    exec: policy tokens without planning; plan: planning tokens. Every token of the batch counts once (not a mean of
    means); the variance is the population's, from deviations in float64. A kind without tokens gives three zeros.
    Values outside the mask may be anything.
    """
    check_shape("planning_B_T", planning_B_T, uncertainty_B_T.shape, "uncertainty_B_T")
    check_shape("mask_B_T", mask_B_T, uncertainty_B_T.shape, "uncertainty_B_T")
    mask_B_T, planning_B_T = as_bool("mask_B_T", mask_B_T), as_bool("planning_B_T", planning_B_T)
    stats = {}
    for name, member_B_T in (("exec", mask_B_T & ~planning_B_T), ("plan", mask_B_T & planning_B_T)):
        count = member_B_T.sum().double()
        value_B_T = torch.where(member_B_T, uncertainty_B_T.detach().to(torch.float64), 0.0)
        mean = value_B_T.sum() / count.clamp(min=1)
        square_B_T = torch.where(member_B_T, (value_B_T - mean) ** 2, 0.0)
        stats |= {
            f"{name}_mean": mean,
            f"{name}_var": square_B_T.sum() / count.clamp(min=1),
            f"{name}_count": count,
        }
    return stats
