"""SEPA moves the uncertainties of execution tokens towards their mean; its variants move them apart."""

import math

import torch

from verl_credit.credit.checks import as_bool, check_shape, output_dtype
from verl_credit.credit.groups import row_mean
from verl_credit.credit.token.uncertainty import MAX_SURPRISAL


def sepa_pool(
    uncertainty_B_T: torch.Tensor, planning_B_T: torch.Tensor, mask_B_T: torch.Tensor, lam: float
) -> torch.Tensor:
    """Pool the uncertainties of a row's execution tokens (policy tokens that are not planning).

        h_t <- lam mean(h of execution) + (1 - lam) h_t on execution tokens

    Planning tokens keep theirs.
    The mean of a row is preserved, so the GTPO weights of planning tokens do not change and only execution tokens are
    flattened. lam=0 is plain GTPO, lam=1 gives all execution tokens of a row one weight. lam is clamped to [0, 1] and h
    to at most 50 (the released code does not clamp h if lam is 0, but GTPO does then); a row without execution tokens is
    unchanged. 0 outside the mask. No gradient flows.
    Returns the input's dtype, at least float32. Source: the SEPA paper and its code, retrain.
    """
    h_B_T, execution_B_T, mean_B_1, lam = _prepared(uncertainty_B_T, planning_B_T, mask_B_T, lam)
    lam_B_T = execution_B_T.double().mul_(lam)
    pooled_B_T = (1 - lam_B_T).mul_(h_B_T).add_(lam_B_T.mul_(mean_B_1))
    return pooled_B_T.to(output_dtype(uncertainty_B_T))


def sepa_amp(
    uncertainty_B_T: torch.Tensor, planning_B_T: torch.Tensor, mask_B_T: torch.Tensor, lam: float
) -> torch.Tensor:
    """Move the uncertainties of execution tokens away from their mean.

        h_t <- (1 + lam) h_t - lam mean(h of execution) on execution tokens

    The mean of a row is preserved here too. Values may fall below 0, where GTPO's floor on weights may act, and rise
    above 50, where GTPO's bound changes the mean, and with it the planning tokens' weights.
    Otherwise as `sepa_pool`.
    """
    h_B_T, execution_B_T, mean_B_1, lam = _prepared(uncertainty_B_T, planning_B_T, mask_B_T, lam)
    amplified_B_T = torch.where(execution_B_T, (1 + lam) * h_B_T - lam * mean_B_1, h_B_T)
    return amplified_B_T.to(output_dtype(uncertainty_B_T))


def sepa_amp_c(
    uncertainty_B_T: torch.Tensor, planning_B_T: torch.Tensor, mask_B_T: torch.Tensor, lam: float
) -> torch.Tensor:
    """`sepa_amp` with a floor.

        h_t <- max(0, (1 + lam) h_t - lam mean(h of execution)) on execution tokens

    Where the floor acts the row's mean grows, and its planning weights shrink.
    """
    return sepa_amp(uncertainty_B_T, planning_B_T, mask_B_T, lam).clamp(min=0)


def _prepared(uncertainty_B_T, planning_B_T, mask_B_T, lam):
    if not math.isfinite(lam):
        raise ValueError(f"lam={lam}; expected a finite number")
    for name, tensor in (("planning_B_T", planning_B_T), ("mask_B_T", mask_B_T)):
        check_shape(name, tensor, uncertainty_B_T.shape, "uncertainty_B_T")
    mask_B_T = as_bool("mask_B_T", mask_B_T)
    execution_B_T = mask_B_T & ~as_bool("planning_B_T", planning_B_T)
    h_B_T = torch.where(mask_B_T, uncertainty_B_T.detach().to(torch.float64), 0.0).clamp_(max=MAX_SURPRISAL)
    return h_B_T, execution_B_T, row_mean(h_B_T, execution_B_T), min(max(float(lam), 0.0), 1.0)
