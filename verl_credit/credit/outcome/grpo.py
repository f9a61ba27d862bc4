"""GRPO: the outcome minus the prompt's mean, over the prompt's std."""

import torch

from verl_credit.credit.checks import check_name, output_dtype
from verl_credit.credit.groups import EPS, finite_rows, group_stats, over_std
from verl_credit.credit.operator import CENTRED, NORMALISED, Operator


def grpo(
    outcome_B: torch.Tensor,
    group_B: torch.Tensor,
    *,
    norm_by_std: bool = True,
    ddof: int = 1,
    variance_floor: float = 0.0,
    eps: float = EPS,
    singleton: str = "zero",
    row_valid_B: torch.Tensor | None = None,
) -> torch.Tensor:
    """Group-relative outcome advantage (GRPO; without the division it is Dr. GRPO's).

        A_i = (r_i - mean(r)) / (std(r) + eps), eps = 1e-6
        A_i = r_i - mean(r) if not norm_by_std

    The defaults are verl's `compute_grpo_outcome_advantage`: unbiased std (ddof=1), no variance floor. With
    ddof=0 and variance_floor=1e-8 it is the outcome term of the released A2TGPO modes.
    Edge cases: equal outcomes give exactly 0 (verl leaves a rounding residue); a group of one gives 0
    (singleton="zero") or its plain outcome over 1 + eps as in verl (singleton="raw").
    Rows with row_valid False enter no statistic and get 0. Statistics in float64; returns the input's dtype,
    at least float32. Raises ValueError for an outcome that is not finite in a valid row.
    Source: 2402.03300; 2503.20783 for the centred form.
    """
    check_name("singleton", singleton, ("zero", "raw"))
    valid_B = finite_rows(outcome_B, group_B, row_valid_B)
    stats = group_stats(outcome_B, group_B, member_N=valid_B, ddof=ddof, variance_floor=variance_floor)
    numerator_B, std_B = stats.deviation_N, stats.std_N
    if singleton == "raw":
        alone_B = valid_B & (stats.count_N == 1)
        numerator_B = torch.where(alone_B, outcome_B.to(torch.float64), numerator_B)
    advantage_B = over_std(numerator_B, std_B, eps) if norm_by_std else numerator_B
    return advantage_B.to(output_dtype(outcome_B))


OPERATOR = Operator(
    name="grpo",
    level="outcome",
    function=grpo,
    reduces_to="verl's GRPO; without std Dr. GRPO's advantage",
    bias="own sample in mean and std: the gradient is shrunk by (n-1)/n, and easy and hard prompts are weighed up",
    departures="equal outcomes give exactly 0 (verl leaves a rounding residue); groups of one give 0",
    source="2402.03300",
    objective="2 arcsin sqrt(p), large groups",
    properties=CENTRED | NORMALISED,
)
