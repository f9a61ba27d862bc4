"""`token_credit`: from one advantage per turn to one per token."""

from __future__ import annotations

from dataclasses import dataclass, field

from verl_credit.credit.arguments import as_bool, check_name, check_shape, given, output_dtype, refuse_rows
from verl_credit.credit.groups import row_chunks
from verl_credit.credit.token.gtpo import hicra
from verl_credit.credit.token.token_transforms import TRANSFORMS, token_weights
from verl_credit.lazy import torch


@dataclass(frozen=True)
class TokenCredit:
    """Advantages of the policy's tokens (0 elsewhere), their weights, and statistics."""

    advantage_B_T: torch.Tensor
    weight_B_T: torch.Tensor
    stats: dict[str, float] = field(default_factory=dict)


def token_credit(
    turn_advantage_B_T: torch.Tensor,
    mask_B_T: torch.Tensor,
    *,
    transform_mode: str = "none",
    uncertainty_B_T: torch.Tensor | None = None,
    planning_B_T: torch.Tensor | None = None,
    group_B: torch.Tensor | None = None,
    sepa_lambda: float = 0.0,
    gtpo_beta: float = 0.1,
    hicra_alpha: float = 0.2,
    entropy_mask_rho: float = 0.2,
) -> TokenCredit:
    """Weigh the tokens of every turn by their uncertainty, then amplify planning tokens.

        A[b, t] = A_turn[b, turn(t)] w[b, t]        w = mask(gtpo(pool(h)))
        A'[b, t] = A[b, t] + hicra_alpha |A[b, t]| planning[b, t]      in hicra and the ..._hicra modes

    `transform_mode="none"`, `gtpo` with gtpo_beta=0 and `hicra` with hicra_alpha=0 return the turns' advantages unchanged.
    Uncertainties are compared among a row's own tokens of all turns: a weight says which tokens of a trajectory
    mattered, the turn's advantage how much the turn mattered.
    `stats`, over all policy tokens of the batch: mean, variance and number of the uncertainties of execution and
    planning tokens before and after pooling (exec_entropy_mean, ..., post_exec_entropy_mean, ...), when there are
    uncertainties; without a planning mask every token counts as execution.

    Shapes: B rows, T response tokens. The mask is False for observations and for rows that are not valid.
    Returns the widest dtype of advantages and uncertainties, at least float32.
    Raises ValueError for an unknown mode, for an input that the mode needs and did not get, and for advantages or
    uncertainties that are not finite on a policy token.
    Source: GTPO weights, SEPA and HICRA as in `gtpo`, `sepa`, `hicra`.
    """
    check_name("transform_mode", transform_mode, TRANSFORMS)
    transform = TRANSFORMS[transform_mode]
    check_shape("mask_B_T", mask_B_T, turn_advantage_B_T.shape, "turn_advantage_B_T")
    mask_B_T = as_bool("mask_B_T", mask_B_T)
    for name, tensor, needed in (
        ("turn_advantage_B_T", turn_advantage_B_T, True),
        ("uncertainty_B_T", uncertainty_B_T, transform.weighted),
        ("planning_B_T", planning_B_T, transform.needs_planning),
        ("group_B", group_B, transform.masked),
    ):
        if needed and tensor is None:
            raise ValueError(f"transform_mode={transform_mode!r} needs {name}, which is None")
        if tensor is None or name == "group_B":
            continue
        check_shape(name, tensor, turn_advantage_B_T.shape, "turn_advantage_B_T")
        for rows in row_chunks(mask_B_T) if tensor.dtype.is_floating_point else ():
            bad_C_T = mask_B_T[rows] & (tensor[rows] - tensor[rows] != 0)  # NaN: half the time of isfinite
            problem = "is not finite on a policy token; expected finite numbers"
            refuse_rows(name, bad_C_T, problem, first=rows.start)
    dtype = output_dtype(turn_advantage_B_T, *([] if uncertainty_B_T is None else [uncertainty_B_T]))
    if planning_B_T is not None:
        planning_B_T = as_bool("planning_B_T", planning_B_T)
    strengths = {"sepa_lambda": sepa_lambda, "gtpo_beta": gtpo_beta, "entropy_mask_rho": entropy_mask_rho}
    advantages, weights, raw, pooled = [], [], [], []
    # The mask ranks the tokens of whole prompts.
    for rows in [slice(None)] if transform.masked else row_chunks(mask_B_T):
        mask_C_T = mask_B_T[rows]
        planning_C_T = None if planning_B_T is None else planning_B_T[rows]
        advantage_C_T, weight_C_T = (
            torch.where(mask_C_T, turn_advantage_B_T[rows].detach().to(dtype), 0.0),
            mask_C_T.to(dtype),
        )
        if uncertainty_B_T is not None:
            value_C_T = torch.where(mask_C_T, uncertainty_B_T[rows].detach(), 0.0)
            weight_C_T, pooled_C_T = token_weights(
                transform, value_C_T, mask_C_T, planning_B_T=planning_C_T, group_B=group_B, **strengths
            )
            advantage_C_T = advantage_C_T * weight_C_T.to(dtype)
            raw.append(row_moments(value_C_T, planning_C_T, mask_C_T))
            if transform.pool is not None:
                pooled.append(row_moments(pooled_C_T, planning_C_T, mask_C_T))
        if transform.amplified:
            advantage_C_T = hicra(advantage_C_T, given("planning_B_T", planning_C_T), hicra_alpha)
        advantages.append(advantage_C_T)
        weights.append(weight_C_T)
    stats = stats_of_rows(raw, pooled or raw) if raw else {}
    return TokenCredit(torch.cat(advantages), torch.cat(weights), stats)


def token_stats(
    uncertainty_B_T: torch.Tensor, planning_B_T: torch.Tensor | None, mask_B_T: torch.Tensor
) -> dict[str, float]:
    """`TokenCredit.stats` where nothing is pooled. Values outside the mask may be anything; masks are bool."""
    moments = []
    for rows in row_chunks(mask_B_T):
        value_C_T = torch.where(mask_B_T[rows], uncertainty_B_T[rows], 0.0)
        moments.append(
            row_moments(value_C_T, None if planning_B_T is None else planning_B_T[rows], mask_B_T[rows])
        )
    return stats_of_rows(moments, moments)


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


def stats_of_rows(raw: list[torch.Tensor], pooled: list[torch.Tensor]) -> dict[str, float]:
    """`TokenCredit.stats` of rows by their `row_moments` before and after pooling, at least one table each.

    exec: policy tokens without planning (all, without a planning mask); plan: planning tokens. Every token of the batch
    counts once (not a mean of means); the variance is the population's. A kind without tokens gives three zeros. The names
    avoid words for which verl uses another reduction.
    """
    stats: dict[str, float] = {}
    for prefix, moments in (("", raw), ("post_", pooled)):
        count_B_2, sum_B_2, square_B_2 = torch.cat(moments).unbind(dim=2)
        for kind, name in enumerate(("exec", "plan")):
            count_B, sum_B = count_B_2[:, kind], sum_B_2[:, kind]
            count = count_B.sum()
            mean = sum_B.sum() / count.clamp(min=1)
            between_B = count_B * (sum_B / count_B.clamp(min=1) - mean) ** 2
            variance = (square_B_2[:, kind] + between_B).sum() / count.clamp(min=1)
            for of, value in (("mean", mean), ("var", variance), ("count", count)):
                stats[f"{prefix}{name}_entropy_{of}"] = float(value)
    return stats
