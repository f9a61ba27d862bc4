"""A mask that leaves credit only to the most uncertain tokens of a prompt."""

import math

import torch

from verl_credit.credit.checks import as_bool, as_group_ids, check_shape, output_dtype


def entropy_mask(
    uncertainty_B_T: torch.Tensor, mask_B_T: torch.Tensor, group_B: torch.Tensor, *, rho: float
) -> torch.Tensor:
    """1 for the top share rho of a prompt's policy tokens by uncertainty, 0 for the others.

        w_t <- 0 where h_t is below that of rank max(1, int(n rho)) among the n tokens of the prompt

    The tokens of all trajectories of a prompt are ranked together, and ties with that rank are kept. rho <= 0 (off) and
    rho >= 1 keep every policy token. 0 outside the mask, whose tokens enter no ranking.
    Returns the input's dtype, at least float32. Source: retrain's proxy for Yue et al.
    """
    if not math.isfinite(rho):
        raise ValueError(f"rho={rho}; expected a share from 0 to 1")
    check_shape("mask_B_T", mask_B_T, uncertainty_B_T.shape, "uncertainty_B_T")
    check_shape("group_B", group_B, uncertainty_B_T.shape[:1], "uncertainty_B_T has rows")
    mask_B_T = as_bool("mask_B_T", mask_B_T)
    group_B, dtype = as_group_ids("group_B", group_B), output_dtype(uncertainty_B_T)
    if not 0 < rho < 1 or not mask_B_T.any():
        return mask_B_T.to(dtype)
    row_N, _ = mask_B_T.nonzero(as_tuple=True)
    group_N = group_B[row_N]
    value_N = uncertainty_B_T.detach()[mask_B_T].to(torch.float64)
    by_value = torch.argsort(value_N, descending=True, stable=True)
    order_N = by_value[torch.argsort(group_N[by_value], stable=True)]  # by group, then from the largest down
    count_G = torch.bincount(group_N)
    rank_G = (count_G.double() * rho).long().clamp(min=1) - 1  # float32 would round 28.999... up
    threshold_G = value_N[order_N][(count_G.cumsum(0) - count_G) + rank_G]
    keep_B_T = torch.zeros_like(mask_B_T)
    keep_B_T[mask_B_T] = value_N >= threshold_G[group_N]
    return keep_B_T.to(dtype)
