"""GTPO weights: uncertain tokens get more of their trajectory's credit."""

import math

import torch

from verl_credit.credit.checks import as_bool, check_shape, output_dtype
from verl_credit.credit.token.uncertainty import MAX_SURPRISAL

EPS = 1e-8
SMALLEST_MEAN = 1e-7  # below it a row's uncertainties are rounding noise, and its weights 1


def gtpo_weights(uncertainty_B_T: torch.Tensor, mask_B_T: torch.Tensor, *, beta: float = 0.1) -> torch.Tensor:
    """A weight per policy token, by its uncertainty beside the mean of its row.

        w_t = max(0, 1 + beta (h_t / (mean(h) + 1e-8) - 1)), h_t at most 50

    The mean is over the row's policy tokens of all turns; observations have weight 0 and do not enter it. While the
    floor does not act, the weights of a row sum to its number of tokens (up to the 1e-8); for h >= 0 and beta <= 1 it
    never acts. beta=0, or a mean below 1e-7, gives weight 1.
    Uncertainties must be finite on policy tokens (`uncertainty` checks that), and may be anything elsewhere. No
    gradient flows. Returns the input's dtype, at least float32. Source: the weighting of retrain, after 2508.04349
    (whose own algorithm is `gtpo_canonical`).
    """
    if not 0 <= beta < math.inf:
        raise ValueError(f"beta={beta}; expected a number of at least 0")
    check_shape("mask_B_T", mask_B_T, uncertainty_B_T.shape, "uncertainty_B_T")
    mask_B_T = as_bool("mask_B_T", mask_B_T)
    value_B_T = torch.where(mask_B_T, uncertainty_B_T.detach().to(torch.float64), 0.0)
    value_B_T.clamp_(max=MAX_SURPRISAL)
    mean_B_1 = value_B_T.sum(dim=1, keepdim=True) / mask_B_T.sum(dim=1, keepdim=True).clamp(min=1)
    weight_B_T = value_B_T.div_(mean_B_1 + EPS).sub_(1).mul_(beta).add_(1).clamp_(min=0)
    noise_B = mean_B_1.squeeze(1) < SMALLEST_MEAN
    if noise_B.any():
        weight_B_T[noise_B] = 1.0
    return torch.where(mask_B_T, weight_B_T, 0.0).to(output_dtype(uncertainty_B_T))
