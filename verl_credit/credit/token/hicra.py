"""HICRA: planning tokens gain more from a good outcome and lose less by a bad one."""

import math

import torch

from verl_credit.credit.checks import as_bool, check_shape, output_dtype


def hicra(advantage_B_T: torch.Tensor, planning_B_T: torch.Tensor, alpha: float = 0.2) -> torch.Tensor:
    """Amplify the advantages of planning tokens.

        A'_t = A_t + alpha |A_t| planning_t

    A positive advantage grows by the factor 1 + alpha, a negative one shrinks by 1 - alpha: for alpha < 1 no sign
    flips. alpha=0 and a mask of zeros change nothing. It is applied after token weights; values outside the response
    mask are unchanged. Returns the input's dtype, at least float32. Source: 2509.03646.
    """
    if not 0 <= alpha < math.inf:
        raise ValueError(f"alpha={alpha}; expected a number of at least 0")
    check_shape("planning_B_T", planning_B_T, advantage_B_T.shape, "advantage_B_T")
    planning_B_T = as_bool("planning_B_T", planning_B_T)
    advantage_B_T = advantage_B_T.to(output_dtype(advantage_B_T))
    return torch.where(planning_B_T, advantage_B_T.abs().mul_(alpha).add_(advantage_B_T), advantage_B_T)
