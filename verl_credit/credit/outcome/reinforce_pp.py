"""REINFORCE++ with the prompt's mean as baseline: centred per prompt, normalised over the batch."""

import torch

from verl_credit.credit.checks import check_shape, first_row, output_dtype
from verl_credit.credit.groups import finite_rows, group_stats, over_std
from verl_credit.credit.operator import CENTRED, NORMALISED, Operator


def reinforce_pp(
    outcome_B: torch.Tensor,
    group_B: torch.Tensor,
    *,
    eps: float = 1e-8,
    row_weight_B: torch.Tensor | None = None,
    row_valid_B: torch.Tensor | None = None,
) -> torch.Tensor:
    """Group-centred outcomes with the batch's mean and spread.

        a_i = r_i - mean(r of the prompt)
        A_i = (a_i - mean(a)) / (std(a) + eps) over the batch, eps = 1e-8

    Population std; a batch whose std is below eps is only centred. Each trajectory counts once, or `row_weight_B`
    times (its number of policy tokens gives verl's token-weighted whitening).
    Scope: the batch. A prompt's tied outcomes give a_i = 0, which enters the statistics like any value and becomes
    -mean(a) / std(a), which is 0 when every trajectory counts once.
    Departure from published code, which treats advantages of exactly 0.0 as padding: here a mask marks padding. Rows
    with row_valid False enter no statistic and get 0.
    Raises ValueError for an outcome that is not finite in a valid row and for weights that are not positive there.
    Source: 2501.03262.
    """
    valid_B = finite_rows(outcome_B, group_B, row_valid_B)
    centred_B = group_stats(outcome_B, group_B, member_N=valid_B).deviation_N
    weight_B = valid_B.to(torch.float64)
    if row_weight_B is not None:
        check_shape("row_weight_B", row_weight_B, outcome_B.shape, "outcome_B")
        bad_B = valid_B & ~((row_weight_B > 0) & row_weight_B.isfinite())
        if bad_B.any():
            raise ValueError(
                f"row_weight_B row {first_row(bad_B)} is {float(row_weight_B[first_row(bad_B)])}; expected positive numbers"
            )
        weight_B = torch.where(valid_B, row_weight_B.to(torch.float64), 0.0)
    total = weight_B.sum().clamp(min=torch.finfo(torch.float64).tiny)
    # Only weighted deviations need a second centring; the mean of unweighted ones is a rounding residue.
    mean = (weight_B * centred_B).sum() / total if row_weight_B is not None else centred_B.new_zeros(())
    spread_B = torch.where(valid_B, centred_B - mean, 0.0)
    std = ((weight_B * spread_B**2).sum() / total).sqrt()
    advantage_B = torch.where(std < eps, spread_B, over_std(spread_B, std, eps))
    return advantage_B.to(output_dtype(outcome_B))


OPERATOR = Operator(
    name="reinforce_pp",
    level="outcome",
    function=reinforce_pp,
    reduces_to="centred GRPO when the batch's std is 1",
    bias="own sample in both means",
    departures="a real mask instead of 'is not 0.0'; each trajectory counts once",
    source="2501.03262",
    scope="batch",
    properties=CENTRED | NORMALISED,
)
