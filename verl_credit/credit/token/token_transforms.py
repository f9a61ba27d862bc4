"""Token transforms by name, each with its parts and the inputs that it needs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from verl_credit.credit.token.entropy_mask import entropy_mask
from verl_credit.credit.token.gtpo import gtpo_weights
from verl_credit.credit.token.sepa import sepa_amp, sepa_amp_c, sepa_pool

Pool = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float], torch.Tensor]


@dataclass(frozen=True)
class TokenTransform:
    """pool (SEPA) -> GTPO weights -> mask -> HICRA, each of them on or off."""

    pool: Pool | None = None
    weighted: bool = False
    masked: bool = False
    amplified: bool = False

    @property
    def needs_planning(self) -> bool:
        return self.pool is not None or self.amplified

    @property
    def uses_sepa_controller(self) -> bool:
        return self.pool is not None


TRANSFORMS: dict[str, TokenTransform] = {
    "none": TokenTransform(),
    "hicra": TokenTransform(amplified=True),
    "gtpo": TokenTransform(weighted=True),
    "gtpo_hicra": TokenTransform(weighted=True, amplified=True),
    "gtpo_sepa": TokenTransform(pool=sepa_pool, weighted=True),
    "gtpo_sepa_hicra": TokenTransform(pool=sepa_pool, weighted=True, amplified=True),
    "gtpo_sepa_amp": TokenTransform(pool=sepa_amp, weighted=True),
    "gtpo_sepa_amp_c": TokenTransform(pool=sepa_amp_c, weighted=True),
    "entropy_mask": TokenTransform(weighted=True, masked=True),
}


def token_weights(
    transform: TokenTransform,
    uncertainty_B_T: torch.Tensor,
    mask_B_T: torch.Tensor,
    *,
    planning_B_T: torch.Tensor | None = None,
    group_B: torch.Tensor | None = None,
    sepa_lambda: float = 0.0,
    gtpo_beta: float = 0.1,
    entropy_mask_rho: float = 0.2,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(weight_B_T, uncertainty_B_T after pooling). HICRA, which reads advantages, is not a weight."""
    pooled_B_T = uncertainty_B_T
    if transform.pool is not None:
        pooled_B_T = transform.pool(uncertainty_B_T, planning_B_T, mask_B_T, sepa_lambda)
    weight_B_T = mask_B_T.to(uncertainty_B_T.dtype)
    if transform.weighted:
        weight_B_T = gtpo_weights(pooled_B_T, mask_B_T, beta=gtpo_beta)
    if transform.masked:
        weight_B_T = weight_B_T * entropy_mask(uncertainty_B_T, mask_B_T, group_B, rho=entropy_mask_rho)
    return weight_B_T, pooled_B_T
