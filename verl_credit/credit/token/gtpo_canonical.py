"""GTPO and GRPO-S as their paper defines them: rewards shaped by entropy, separately for good and bad trajectories."""

from __future__ import annotations

from verl_credit.credit.arguments import (
    as_bool,
    as_group_ids,
    check_name,
    check_shape,
    output_dtype,
    refuse_rows,
)
from verl_credit.credit.groups import SOLVED_ABOVE, row_chunks, row_mean, valid_rows, z_score, z_score_of_one
from verl_credit.credit.operator import ONE, Operator
from verl_credit.lazy import torch

EPS = 1e-8  # added to entropies, so that equal ones keep exactly equal shares
POPULATIONS = ("polarity", "all", "joint")


def gtpo_canonical(
    outcome_B: torch.Tensor,
    entropy_B_T: torch.Tensor,
    mask_B_T: torch.Tensor,
    group_B: torch.Tensor,
    *,
    alpha_1: float = 1.0,
    alpha_2: float = 0.1,
    population: str = "all",
    entropy_clip: tuple[float, float] | None = None,
    eps: float = EPS,
    row_valid_B: torch.Tensor | None = None,
) -> torch.Tensor:
    """Advantage per token from shaped rewards.

        r+_(i,t) =  alpha_1 + alpha_2 d_t H_(i,t) / sum over rewarded k of H_(k,t)
        r-_(j,t) = -alpha_1 - alpha_2 h_t (1 / H_(j,t)) / sum over the others k of 1 / H_(k,t)
        d_t, h_t: how many rewarded (other) trajectories have a token t, the t-th of a row's own policy tokens
        A = z(r+) + z(r-), over the own polarity's tokens (population=polarity) or all, the other side's 0 (all)

    Observations shift no t. Rewarded: outcome above 0.5.
    Equation 6 of the paper standardises both, and does not say over which tokens:

        population="all"       r+ is 0 on the others' tokens and r- on the rewarded ones'; both are standardised over
                               all tokens of the prompt and added: the contrast of good and bad remains
        population="polarity"  each over its own tokens, as public implementations do: alpha_1 and alpha_2 cancel,
                               and the mean advantage of correct tokens is 0
        population="joint"     r+ and r- together, over all tokens of the prompt

    Population std, denominator std + eps. A prompt whose trajectories are all rewarded or all not gives exactly 0
    (published per-polarity z-scores turn such prompts into noise), so does a group of one.
    entropy_clip bounds H first. No gradient flows.
    Returns the widest input dtype, at least float32. Source: 2508.04349.
    """
    check_name("population", population, POPULATIONS)
    value_B_T, mask_B_T, rewarded_B, group_B, used_B = _polarities(
        outcome_B, entropy_B_T, mask_B_T, group_B, entropy_clip, row_valid_B
    )
    dtype = output_dtype(outcome_B, entropy_B_T)
    advantage_B_T = torch.zeros(mask_B_T.shape, dtype=dtype, device=mask_B_T.device)
    row_N = used_B.nonzero().flatten()
    row_N = row_N[torch.argsort(group_B[row_N], stable=True)]
    sizes = group_B[row_N].unique_consecutive(return_counts=True)[1].tolist()
    for row_R in row_N.split(
        sizes
    ):  # a prompt's tokens fit a CPU's caches; column p is a row's own policy token p
        own_R_T, rewarded_R_1 = mask_B_T[row_R], rewarded_B[row_R][:, None]
        n_R_1 = own_R_T.sum(dim=1, keepdim=True)
        token_R_P = torch.arange(int(n_R_1.max()), device=row_R.device) < n_R_1
        share_R_P = torch.zeros(token_R_P.shape, dtype=torch.float64, device=row_R.device)
        share_R_P.masked_scatter_(token_R_P, value_B_T[row_R][own_R_T])
        share_R_P = torch.where(token_R_P, _shares(share_R_P, rewarded_R_1), 0.0)
        shaped_R_P = torch.zeros_like(share_R_P)
        for sign, side_R in ((1.0, rewarded_B[row_R]), (-1.0, ~rewarded_B[row_R])):
            total_P, count_P = share_R_P[side_R].sum(dim=0), token_R_P[side_R].sum(dim=0)
            relative_R_P = share_R_P[side_R] / torch.where(count_P > 0, total_P, 1.0) * count_P
            shaped_R_P[side_R] = sign * (alpha_1 + alpha_2 * relative_R_P)
        shaped_R_P = torch.where(token_R_P, shaped_R_P, 0.0)
        sides = token_R_P & rewarded_R_1, token_R_P & ~rewarded_R_1
        parts = {
            "joint": [(shaped_R_P, token_R_P)],
            "polarity": [(shaped_R_P, side_R_P) for side_R_P in sides],
            "all": [(torch.where(side_R_P, shaped_R_P, 0.0), token_R_P) for side_R_P in sides],
        }
        scores = (
            z_score_of_one(value_R_P, member_R_P, eps=eps) for value_R_P, member_R_P in parts[population]
        )
        z_R_P = sum(scores, torch.zeros_like(shaped_R_P))
        z_R_T = torch.zeros(own_R_T.shape, dtype=dtype, device=row_R.device)
        advantage_B_T[row_R] = z_R_T.masked_scatter_(own_R_T, z_R_P[token_R_P].to(dtype))
    return advantage_B_T


def grpo_s(
    outcome_B: torch.Tensor,
    entropy_B_T: torch.Tensor,
    mask_B_T: torch.Tensor,
    group_B: torch.Tensor,
    *,
    beta_1: float = 1.0,
    beta_2: float = 0.1,
    entropy_clip: tuple[float, float] | None = None,
    ddof: int = 1,
    eps: float = 1e-6,
    row_valid_B: torch.Tensor | None = None,
) -> torch.Tensor:
    """Advantage per trajectory from shaped rewards.

        r+_i =  beta_1 + beta_2 n H_i / sum over rewarded k of H_k
        r-_j = -beta_1 - beta_2 m (1 / H_j) / sum over the others k of 1 / H_k
        A    = (r - mean(r)) / (std(r) + eps) over the prompt, both polarities together
        H_i: mean entropy of the trajectory's policy tokens

    n rewarded (outcome above 0.5) and m other trajectories.
    Unbiased std (ddof=1) and eps 1e-6, as a public verl fork normalises; the paper's own is not settled. A prompt
    whose trajectories are all rewarded or all not gives exactly 0, so does a group of one. No gradient flows.
    Returns the widest input dtype, at least float32. Source: 2508.04349.
    """
    value_B_T, mask_B_T, rewarded_B, group_B, used_B = _polarities(
        outcome_B, entropy_B_T, mask_B_T, group_B, entropy_clip, row_valid_B
    )
    dtype = output_dtype(outcome_B, entropy_B_T)
    share_B = _shares(row_mean(value_B_T, mask_B_T).squeeze(1), rewarded_B)
    side_B = group_B * 2 + rewarded_B.long()  # numbers the pairs of prompt and polarity
    zeros_C = torch.zeros(2 * len(side_B), dtype=torch.float64, device=side_B.device)
    total_C = zeros_C.index_add(0, side_B[used_B], share_B[used_B])
    count_C = zeros_C.index_add(0, side_B[used_B], torch.ones_like(share_B[used_B]))
    relative_B = share_B / torch.where(used_B, total_C[side_B], 1.0) * count_C[side_B]
    shaped_B = torch.where(rewarded_B, 1.0, -1.0) * (beta_1 + beta_2 * relative_B)
    z_B = z_score(shaped_B, group_B, member_N=used_B, ddof=ddof, variance_floor=0.0, eps=eps)
    return torch.where(used_B, z_B, 0.0).to(dtype)


def _polarities(
    outcome_B: torch.Tensor,
    entropy_B_T: torch.Tensor,
    mask_B_T: torch.Tensor,
    group_B: torch.Tensor,
    entropy_clip: tuple[float, float] | None,
    row_valid_B: torch.Tensor | None,
) -> tuple[torch.Tensor, ...]:
    """(entropy_B_T in float64, mask_B_T, rewarded_B, group_B, used_B), checked.

    Not used: rows that are not valid or have no token, and groups of one polarity.
    """
    valid_B = valid_rows(outcome_B, group_B, row_valid_B)
    check_shape("mask_B_T", mask_B_T, entropy_B_T.shape, "entropy_B_T")
    check_shape("entropy_B_T", entropy_B_T, (*outcome_B.shape, *entropy_B_T.shape[1:]), "outcome_B has rows")
    mask_B_T = as_bool("mask_B_T", mask_B_T) & valid_B[:, None]
    valid_B = mask_B_T.any(dim=1)
    refuse_rows("outcome_B", valid_B & ~outcome_B.isfinite(), "is not finite; expected finite outcomes")
    value_B_T = torch.empty(mask_B_T.shape, dtype=torch.float64, device=entropy_B_T.device)
    for rows in row_chunks(mask_B_T):
        value_C_T = torch.where(mask_B_T[rows], entropy_B_T[rows].detach().to(torch.float64), 0.0)
        bad_C_T = ~((value_C_T >= -1e-4) & (value_C_T < torch.inf))
        problem = "holds a value that is not an entropy; expected finite numbers >= 0"
        refuse_rows("entropy_B_T", bad_C_T, problem, first=rows.start)
        value_C_T.clamp_(min=0)
        if entropy_clip is not None:
            value_C_T = torch.where(mask_B_T[rows], value_C_T.clamp_(*entropy_clip), 0.0)
        value_B_T[rows] = value_C_T
    group_B = as_group_ids("group_B", group_B)
    rewarded_B = (outcome_B > SOLVED_ABOVE) & valid_B
    zeros_G = torch.zeros(outcome_B.numel(), dtype=torch.long, device=group_B.device)
    members_G = zeros_G.index_add(0, group_B, valid_B.long())
    rewarded_G = zeros_G.index_add(0, group_B, rewarded_B.long())
    mixed_G = (rewarded_G > 0) & (rewarded_G < members_G)
    return value_B_T, mask_B_T, rewarded_B, group_B, valid_B & mixed_G[group_B]


def _shares(entropy_N: torch.Tensor, rewarded_N: torch.Tensor) -> torch.Tensor:
    """A rewarded trajectory's entropy, another one's inverse entropy; never 0."""
    return torch.where(rewarded_N, entropy_N + EPS, (entropy_N + EPS).reciprocal())


CANONICAL: dict[str, Operator] = {
    operator.name: operator
    for operator in (
        Operator(
            name="gtpo_canonical",
            level="canonical",
            function=gtpo_canonical,
            reads=("rewards", "groups", "entropy"),
            reduces_to="normalised +1 / -1 rewards at alpha_2 0",
            bias="population=polarity: the mean advantage of correct tokens is 0",
            departures="groups that are all rewarded or all not give 0",
            source="2508.04349",
            outputs=ONE,
        ),
        Operator(
            name="grpo_s",
            level="canonical",
            function=grpo_s,
            reads=("rewards", "groups", "entropy"),
            reduces_to="normalised +1 / -1 rewards at beta_2 0",
            bias="own sample in mean and std",
            departures="groups that are all rewarded or all not give 0",
            source="2508.04349",
            outputs=ONE,
        ),
    )
}
