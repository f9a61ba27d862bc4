"""GRPO in which outcomes below the prompt's mean have half the weight."""

import torch

from verl_credit.credit.checks import output_dtype
from verl_credit.credit.operator import CENTRED, NORMALISED, Operator
from verl_credit.credit.outcome.grpo import grpo

WEIGHT = 0.5


def half_negative(
    outcome_B: torch.Tensor, group_B: torch.Tensor, *, row_valid_B: torch.Tensor | None = None
) -> torch.Tensor:
    """Halves the weight of failures, because they differ more from each other than successes do.

        z_i = (r_i - mean(r)) / (std(r) + 1e-6)
        A_i = z_i if z_i > 0, else z_i / 2

    With binary outcomes this is a baseline below the mean, m / (2 - m) in place of m, times 1 - m / 2, over the std: in the
    limit of large groups the gradient of F(p) with F'(p) = (1 - p / 2) / sqrt(p (1 - p)) for a prompt solved with
    probability p. So it weighs hard prompts up a little more than GRPO. Why a lower baseline has less noise: `low_baseline`;
    unlike that, equal outcomes give 0, and outcomes may count from anywhere.
    Edge cases and errors are grpo's. Measured in evidence/fidelity/README.md.
    """
    z_B = grpo(outcome_B.to(torch.float64), group_B, row_valid_B=row_valid_B)
    return torch.maximum(z_B, WEIGHT * z_B).to(output_dtype(outcome_B))


OPERATOR = Operator(
    name="half_negative",
    level="outcome",
    function=half_negative,
    reduces_to="grpo where no outcome is below the mean",
    bias="own sample in mean and std; a baseline below the mean, and hard prompts weigh more than with grpo",
    departures="equal outcomes and groups of one give 0; the mean advantage of a prompt is not 0",
    source="evidence/fidelity/README.md",
    properties=CENTRED | NORMALISED,
)
