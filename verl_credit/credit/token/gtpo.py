"""The parts of token transforms: GTPO's weights; SEPA, which pools uncertainties before them; the entropy mask; HICRA."""

from __future__ import annotations

import math

from verl_credit.credit.arguments import as_bool, as_group_ids, check_shape, output_dtype
from verl_credit.credit.groups import in_canonical_order, row_mean
from verl_credit.credit.operator import Range
from verl_credit.credit.token.uncertainty import MAX_SURPRISAL
from verl_credit.lazy import torch

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
    Range(0.0).check("beta", beta)
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
    group_N = group_B[mask_B_T.nonzero(as_tuple=True)[0]]
    value_N = uncertainty_B_T.detach()[mask_B_T].to(torch.float64)
    sorted_N, _ = in_canonical_order(value_N, group_N)
    count_G = torch.bincount(group_N)
    rank_G = (count_G.double() * rho).long().clamp(min=1)  # float32 would round 28.999... up
    threshold_G = sorted_N[count_G.cumsum(0) - rank_G]
    keep_B_T = torch.zeros_like(mask_B_T)
    keep_B_T[mask_B_T] = value_N >= threshold_G[group_N]
    return keep_B_T.to(dtype)


def hicra(advantage_B_T: torch.Tensor, planning_B_T: torch.Tensor, alpha: float = 0.2) -> torch.Tensor:
    """Amplify the advantages of planning tokens.

        A'_t = A_t + alpha |A_t| planning_t

    A positive advantage grows by the factor 1 + alpha, a negative one shrinks by 1 - alpha: for alpha < 1 no sign
    flips. alpha=0 and a mask of zeros change nothing. It is applied after token weights; values outside the response
    mask are unchanged. Returns the input's dtype, at least float32. Source: 2509.03646.
    """
    Range(0.0).check("alpha", alpha)
    check_shape("planning_B_T", planning_B_T, advantage_B_T.shape, "advantage_B_T")
    planning_B_T = as_bool("planning_B_T", planning_B_T)
    advantage_B_T = advantage_B_T.to(output_dtype(advantage_B_T))
    return torch.where(planning_B_T, advantage_B_T.abs().mul_(alpha).add_(advantage_B_T), advantage_B_T)
