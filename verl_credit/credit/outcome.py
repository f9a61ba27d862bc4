"""The outcome operators: how a prompt's outcomes become an advantage per trajectory."""

from __future__ import annotations

from collections.abc import Callable

from verl_credit.credit.arguments import check_name, check_shape, output_dtype, refuse_rows
from verl_credit.credit.groups import EPS, finite_rows, group_stats, minus_others, over_std
from verl_credit.credit.operator import CENTRED, NORMALISED, Operator, Range
from verl_credit.lazy import torch

OUTCOME_OPERATORS: dict[str, Operator] = {}


def _operator(**declared) -> Callable[[Callable], Callable]:
    """Declares the function below as the operator of its name."""

    def declare(function: Callable) -> Callable:
        name = function.__name__
        OUTCOME_OPERATORS[name] = Operator(name=name, level="outcome", function=function, **declared)
        return function

    return declare


@_operator(
    reduces_to="verl's GRPO; without std Dr. GRPO's advantage",
    bias="own sample in mean and std: the gradient is shrunk by (n-1)/n, and easy and hard prompts are weighed up",
    departures="equal outcomes give exactly 0 (verl leaves a rounding residue); groups of one give 0",
    source="2402.03300",
    objective="2 arcsin sqrt(p), large groups",
    properties=CENTRED | NORMALISED,
)
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
    Equal outcomes give exactly 0; a group of one gives 0 (singleton="zero") or its plain outcome over 1 + eps as in verl
    ("raw"). Rows with row_valid False enter no statistic and get 0. Statistics in float64; returns the input's dtype,
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


@_operator(
    reduces_to="REINFORCE with a leave-one-out baseline; centred GRPO times n / (n - 1)",
    bias="none: own sample excluded, no std",
    departures="groups of one give 0 (verl: their plain outcome)",
    source="2402.14740",
    objective="r",
    properties=CENTRED,
)
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


@_operator(
    reduces_to="rloo with half of its baseline",
    bias="none: own sample excluded, no std; the mean advantage of a prompt is not 0",
    departures="equal outcomes r give r / 2; outcomes count from 0, the value of a failure; groups of one give 0",
    source="evidence/fidelity/README.md",
    objective="r",
    exempt={"ties": "its baseline is half of the mean"},
)
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
    Range(0.0, 1.0, high_allowed=True).check("share", share)
    valid_B = finite_rows(outcome_B, group_B, row_valid_B)
    several_B = valid_B & (group_stats(outcome_B, group_B, member_N=valid_B).count_N > 1)
    centred_B = minus_others(outcome_B, group_B, valid_B)
    outcome = torch.where(several_B, outcome_B.to(torch.float64), 0.0)
    return ((1 - share) * outcome + share * centred_B).to(output_dtype(outcome_B))


@_operator(
    reduces_to="grpo where no outcome is below the mean",
    bias="own sample in mean and std; a baseline below the mean, and hard prompts weigh more than with grpo",
    departures="equal outcomes and groups of one give 0; the mean advantage of a prompt is not 0",
    source="evidence/fidelity/README.md",
    properties=CENTRED | NORMALISED,
)
def half_negative(
    outcome_B: torch.Tensor, group_B: torch.Tensor, *, row_valid_B: torch.Tensor | None = None
) -> torch.Tensor:
    """Halves the weight of failures, because they differ more from each other than successes do.

        z_i = (r_i - mean(r)) / (std(r) + 1e-6)
        A_i = z_i if z_i > 0, else z_i / 2

    With binary outcomes this is a baseline below the mean, m / (2 - m) in place of m, times 1 - m / 2, over the std: in the
    limit of large groups the gradient of F(p) with F'(p) = (1 - p / 2) / sqrt(p (1 - p)) for a prompt solved with
    probability p. `low_baseline` says why a lower baseline has less noise. Outcomes may count from anywhere; edge cases and
    errors are grpo's. Measured in evidence/fidelity/README.md.
    """
    z_B = grpo(outcome_B.to(torch.float64), group_B, row_valid_B=row_valid_B)
    return torch.maximum(z_B, 0.5 * z_B).to(output_dtype(outcome_B))


@_operator(
    reduces_to="centred GRPO divided by the prompt's success rate",
    bias="own sample in the mean",
    departures="guarded where the mean is not positive (the official code divides all the same); groups of one give 0",
    source="2602.02710",
    objective="log p, n - 1 terms",
    properties=NORMALISED,
    exempt={"signed": "it divides by the mean outcome, and refuses outcomes below 0"},
)
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
    problem = "is {value:g}; maxrl divides by the mean outcome, expected at least 0"
    refuse_rows("outcome_B", valid_B & (outcome_B < 0), problem, outcome_B)
    stats = group_stats(outcome_B, group_B, member_N=valid_B)
    positive_B = stats.mean_N > eps
    advantage_B = torch.where(positive_B, stats.deviation_N / (stats.mean_N + eps), 0.0)
    return advantage_B.to(output_dtype(outcome_B))


@_operator(
    reduces_to="centred GRPO when the batch's std is 1",
    bias="own sample in both means",
    departures="a real mask instead of 'is not 0.0'; each trajectory counts once",
    source="2501.03262",
    scope="batch",
    properties=CENTRED | NORMALISED,
)
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
        A_i = (a_i - mean(a)) / sqrt(var(a) + eps) over the batch, eps = 1e-8

    Population variance. The floor is that of verl's `masked_whiten`: outcomes that differ by less than 1e-4 in a whole batch
    are noise, and are scaled by at most 1e4. Each trajectory counts once, or `row_weight_B`
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
        refuse_rows("row_weight_B", bad_B, "is {value}; expected positive numbers", row_weight_B)
        weight_B = torch.where(valid_B, row_weight_B.to(torch.float64), 0.0)
    total = weight_B.sum().clamp(min=torch.finfo(torch.float64).tiny)
    # Only weighted deviations need a second centring; the mean of unweighted ones is a rounding residue.
    mean = (weight_B * centred_B).sum() / total if row_weight_B is not None else centred_B.new_zeros(())
    spread_B = torch.where(valid_B, centred_B - mean, 0.0)
    # Only of the valid rows: zeros in between would change the order of the sum, and its last bits.
    variance = (weight_B * spread_B**2)[valid_B].sum() / total
    advantage_B = over_std(spread_B, (variance + eps).sqrt(), 0.0)
    return advantage_B.to(output_dtype(outcome_B))
