"""RLOO: the outcome minus the mean of the prompt's other outcomes."""

import torch

from verl_credit.credit.checks import output_dtype
from verl_credit.credit.groups import finite_rows, minus_others
from verl_credit.credit.operator import CENTRED, Operator


def rloo(
    outcome_B: torch.Tensor, group_B: torch.Tensor, *, row_valid_B: torch.Tensor | None = None
) -> torch.Tensor:
    """REINFORCE with a leave-one-out baseline.

        A_i = r_i - mean(r_j, j != i) = n / (n - 1) (r_i - mean(r))

    The baseline does not contain the trajectory's own outcome, so the policy gradient is unbiased.
    Equal outcomes and groups of one give exactly 0. Rows with row_valid False enter no mean and get 0.
    Raises ValueError for an outcome that is not finite in a valid row.
    Source: 2402.14740.
    """
    valid_B = finite_rows(outcome_B, group_B, row_valid_B)
    return minus_others(outcome_B, group_B, valid_B).to(output_dtype(outcome_B))


OPERATOR = Operator(
    name="rloo",
    level="outcome",
    function=rloo,
    reduces_to="REINFORCE with a leave-one-out baseline; centred GRPO times n / (n - 1)",
    bias="none: own sample excluded, no std",
    departures="groups of one give 0 (verl: their plain outcome)",
    source="2402.14740",
    objective="r",
    properties=CENTRED,
)
