"""MaxRL: the centred outcome divided by the prompt's mean outcome."""

import torch

from verl_credit.credit.checks import first_row, output_dtype
from verl_credit.credit.groups import EPS, group_stats
from verl_credit.credit.outcome.outcome import valid_rows


def maxrl(
    outcome_B: torch.Tensor,
    group_B: torch.Tensor,
    *,
    eps: float = EPS,
    row_valid_B: torch.Tensor | None = None,
) -> torch.Tensor:
    """Rare successes count most.

        A_i = (r_i - mean(r)) / (mean(r) + eps)          0 for the whole prompt where mean(r) <= eps

    With binary outcomes, K of N solved: (N - K) / K for a success and -1 for a failure (times mean / (mean + eps)).
    Outcomes are measured from 0 and are taken to be non-negative; the mean of signed ones may be anything.
    Equal outcomes and groups of one give exactly 0. Rows with row_valid False enter no mean and get 0.
    Departure from the official code: that divides whatever the mean is (a mean of 0 gives 1e6), and gives a lone
    trajectory about 1. Raises ValueError for an outcome that is not finite in a valid row.
    Source: 2602.02710.
    """
    valid_B = valid_rows(outcome_B, group_B, row_valid_B)
    bad_B = valid_B & ~outcome_B.isfinite()
    if bad_B.any():
        row = first_row(bad_B)
        raise ValueError(f"outcome_B row {row} is {float(outcome_B[row])}; expected a finite outcome")
    stats = group_stats(outcome_B, group_B, member_N=valid_B)
    positive_B = stats.mean_N > eps
    advantage_B = torch.where(positive_B, stats.deviation_N / (stats.mean_N + eps), 0.0)
    return advantage_B.to(output_dtype(outcome_B))
