"""Token transforms: each declares its parts here, from which follows what it reads, and what is known of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from verl_credit.credit.arguments import given
from verl_credit.credit.operator import CENTRED, CONSERVES, NORMALISED, WEIGHS, Operator, equation_of
from verl_credit.credit.token.gtpo import entropy_mask, gtpo_weights, hicra, sepa_amp, sepa_amp_c, sepa_pool
from verl_credit.lazy import torch

Pool = Callable[["torch.Tensor", "torch.Tensor", "torch.Tensor", float], "torch.Tensor"]


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


def _token(
    name: str,
    transform: TokenTransform,
    reduces_to: str,
    source: str = "the SEPA paper and its code, retrain",
    conserves: bool = True,
    **more,
) -> Operator:
    parts: list[Callable] = [transform.pool] if transform.pool else []
    parts += [gtpo_weights] if transform.weighted else []
    parts += [entropy_mask] if transform.masked else []
    parts += [hicra] if transform.amplified else []
    reads: tuple[str, ...] = ("uncertainty",) if transform.weighted else ()
    reads += ("planning mask",) if transform.needs_planning else ()
    reads += ("sepa lambda",) if transform.uses_sepa_controller else ()
    reads += ("groups",) if transform.masked else ()
    bias = "that of the turns' advantages"
    if transform.weighted:
        bias = "weights move credit between the tokens of a trajectory; with surprisal they also push on the entropy"
    elif transform.amplified:
        bias = "planning tokens gain credit whatever the outcome: advantages no longer have the mean 0"
    # The turns' advantages come from grpo in the laws, which is where the first two properties come from.
    properties = CENTRED | NORMALISED | WEIGHS | (CONSERVES if conserves else frozenset())
    return Operator(
        name=name,
        level="token",
        function=transform,
        reads=reads,
        equation="; ".join(map(equation_of, parts)) or "w_t = 1",
        reduces_to=reduces_to,
        bias=bias,
        source=source,
        scope="group" if transform.masked else "row",
        properties=properties,
        **more,
    )


TOKEN_OPERATORS = (
    _token("none", TokenTransform(), "the turns' advantages"),
    _token("hicra", TokenTransform(amplified=True), "none at alpha 0", source="2509.03646", conserves=False),
    _token("gtpo", TokenTransform(weighted=True), "none at beta 0", departures="policy tokens of the row only"),
    _token(
        "gtpo_hicra", TokenTransform(weighted=True, amplified=True), "gtpo at alpha 0", source="2509.03646",
        conserves=False,
    ),
    _token("gtpo_sepa", TokenTransform(pool=sepa_pool, weighted=True), "gtpo at lambda 0"),
    _token(
        "gtpo_sepa_hicra", TokenTransform(pool=sepa_pool, weighted=True, amplified=True), "gtpo_sepa at alpha 0",
        conserves=False,
    ),
    _token("gtpo_sepa_amp", TokenTransform(pool=sepa_amp, weighted=True), "gtpo at lambda 0", conserves=False),
    _token("gtpo_sepa_amp_c", TokenTransform(pool=sepa_amp_c, weighted=True), "gtpo at lambda 0"),
    _token(
        "entropy_mask", TokenTransform(weighted=True, masked=True), "gtpo at rho 1",
        source="retrain's proxy for Yue et al.", conserves=False,
    ),
)  # fmt: skip
TRANSFORMS: dict[str, TokenTransform] = {operator.name: operator.function for operator in TOKEN_OPERATORS}


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
        pooled_B_T = transform.pool(
            uncertainty_B_T, given("planning_B_T", planning_B_T), mask_B_T, sepa_lambda
        )
    weight_B_T = mask_B_T.to(uncertainty_B_T.dtype)
    if transform.weighted:
        weight_B_T = gtpo_weights(pooled_B_T, mask_B_T, beta=gtpo_beta)
    if transform.masked:
        prompts_B = given("group_B", group_B)
        weight_B_T = weight_B_T * entropy_mask(uncertainty_B_T, mask_B_T, prompts_B, rho=entropy_mask_rho)
    return weight_B_T, pooled_B_T
