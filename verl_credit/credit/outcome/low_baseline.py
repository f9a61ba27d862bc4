"""The outcome minus a part of the mean of the prompt's other outcomes."""

import torch

from verl_credit.credit.checks import output_dtype
from verl_credit.credit.groups import finite_rows, group_stats, minus_others
from verl_credit.credit.operator import Operator


def low_baseline(
    outcome_B: torch.Tensor,
    group_B: torch.Tensor,
    *,
    share: float = 0.5,
    row_valid_B: torch.Tensor | None = None,
) -> torch.Tensor:
    """REINFORCE with half of RLOO's baseline.

        A_i = r_i - share mean(r_j, j != i), share = 1/2

    share 1 is RLOO, share 0 is REINFORCE without a baseline.
    The gradient is unbiased for every share. Which share has the least noise depends on the trajectories: the best baseline
    is E[r |s|^2] / E[|s|^2] with the score s = grad log pi(trajectory). That is below the mean outcome where a success has a
    smaller score than a failure, because successes are alike and failures are not. Measured in evidence/fidelity/README.md.

    Departure from RLOO and GRPO: a prompt whose outcomes are all r has the advantage (1 - share) r, not 0, and outcomes must
    count from 0, the value of a failure. Groups of one and rows with row_valid False give 0.
    Raises ValueError for an outcome of a valid row that is not finite, and for a share outside [0, 1].
    """
    if not 0 <= share <= 1:
        raise ValueError(f"share={share!r}: expected a number from 0 to 1")
    valid_B = finite_rows(outcome_B, group_B, row_valid_B)
    several_B = valid_B & (group_stats(outcome_B, group_B, member_N=valid_B).count_N > 1)
    centred_B = minus_others(outcome_B, group_B, valid_B)
    outcome = torch.where(several_B, outcome_B.to(torch.float64), 0.0)
    return ((1 - share) * outcome + share * centred_B).to(output_dtype(outcome_B))


OPERATOR = Operator(
    name="low_baseline",
    level="outcome",
    function=low_baseline,
    reduces_to="rloo with half of its baseline",
    bias="none: own sample excluded, no std; the mean advantage of a prompt is not 0",
    departures="equal outcomes r give r / 2; outcomes count from 0, the value of a failure; groups of one give 0",
    source="evidence/fidelity/README.md",
    objective="r",
    exempt={"ties": "its baseline is half of the mean"},
)
