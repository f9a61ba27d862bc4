"""MaxRL: the centred outcome divided by the prompt's mean outcome."""

import torch

from verl_credit.credit.checks import first_row, output_dtype
from verl_credit.credit.groups import EPS, finite_rows, group_stats
from verl_credit.credit.operator import NORMALISED, Operator


def maxrl(
    outcome_B: torch.Tensor,
    group_B: torch.Tensor,
    *,
    eps: float = EPS,
    row_valid_B: torch.Tensor | None = None,
) -> torch.Tensor:
    """Gives rare successes the largest advantage.

        A_i = (r_i - mean(r)) / (mean(r) + eps), eps = 1e-6
        A_i = 0 for the whole prompt where mean(r) <= eps

    With binary outcomes, K of N solved: (N - K) / K for a success and -1 for a failure (times mean / (mean + eps)).
    Equal outcomes and groups of one give exactly 0. Rows with row_valid False enter no mean and get 0.
    Departure from the official code, which always divides (a mean of 0 gives 1e6), and gives a single trajectory
    about 1. Raises ValueError for an outcome of a valid row that is not finite, or below 0: the mean of signed outcomes may
    be near 0 while they are not, and the advantages then have no bound.
    Source: 2602.02710.
    """
    valid_B = finite_rows(outcome_B, group_B, row_valid_B)
    negative_B = valid_B & (outcome_B < 0)
    if negative_B.any():
        row = first_row(negative_B)
        raise ValueError(
            f"outcome_B row {row} is {float(outcome_B[row]):g}; maxrl divides by the mean outcome, expected at least 0"
        )
    stats = group_stats(outcome_B, group_B, member_N=valid_B)
    positive_B = stats.mean_N > eps
    advantage_B = torch.where(positive_B, stats.deviation_N / (stats.mean_N + eps), 0.0)
    return advantage_B.to(output_dtype(outcome_B))


OPERATOR = Operator(
    name="maxrl",
    level="outcome",
    function=maxrl,
    reduces_to="centred GRPO divided by the prompt's success rate",
    bias="own sample in the mean",
    departures="guarded where the mean is not positive (the official code divides all the same); groups of one give 0",
    source="2602.02710",
    objective="log p, n - 1 terms",
    properties=NORMALISED,
    exempt={"signed": "it divides by the mean outcome, and refuses outcomes below 0"},
)
