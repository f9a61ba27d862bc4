"""GTPO as its paper defines it: rewards shaped per token by entropy, separately for good and bad trajectories."""

from __future__ import annotations

import torch

from verl_credit.credit.checks import check_name, output_dtype
from verl_credit.credit.groups import z_score
from verl_credit.credit.token.polarity import EPS, Polarity, polarity, shares

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

    d_t and h_t: the number of rewarded (other) trajectories of the prompt with a token at t; t counts a row's own policy
    tokens, so observations shift nothing. Rewarded: outcome above 0.5.
    Equation 6 of the paper standardises both, and does not say over which tokens:

        population="all"       r+ is 0 on the others' tokens and r- on the rewarded ones'; both are standardised over
                               all tokens of the prompt and added: the contrast of good and bad remains
        population="polarity"  each over its own tokens, as public implementations do: alpha_1 and alpha_2 cancel,
                               and the mean advantage of correct tokens is 0
        population="joint"     r+ and r- together, over all tokens of the prompt

    Population std, denominator std + eps. A prompt whose trajectories are all rewarded or all not gives exactly 0
    (published per-polarity z-scores turn such prompts into noise), so does a group of one.
    entropy_clip bounds H first; outside the range of typical entropies it makes all ratios equal. No gradient flows.
    Returns the widest input dtype, at least float32. Source: 2508.04349.
    """
    check_name("population", population, POPULATIONS)
    sides = polarity(
        outcome_B, entropy_B_T, mask_B_T, group_B, entropy_clip=entropy_clip, row_valid_B=row_valid_B
    )
    shaped_B_T = _shaped(sides, alpha_1, alpha_2)
    token_B_T = sides.mask_B_T & sides.in_use_B[:, None]
    plus_B_T = token_B_T & sides.rewarded_B[:, None]
    parts = {"joint": [(shaped_B_T, token_B_T)]}
    parts["polarity"] = [(shaped_B_T, plus_B_T), (shaped_B_T, token_B_T & ~plus_B_T)]
    parts["all"] = [
        (torch.where(plus_B_T, shaped_B_T, 0.0), token_B_T),
        (torch.where(token_B_T & ~plus_B_T, shaped_B_T, 0.0), token_B_T),
    ]
    advantage_B_T = torch.zeros_like(shaped_B_T)
    for value_B_T, member_B_T in parts[population]:
        group_B_T = sides.group_B[:, None].expand_as(value_B_T)
        member_N = member_B_T.flatten()
        z_N = z_score(
            value_B_T.flatten(), group_B_T.flatten(), member_N=member_N, variance_floor=0.0, eps=eps
        )
        advantage_B_T = advantage_B_T + torch.where(member_B_T, z_N.view_as(value_B_T), 0.0)
    return advantage_B_T.to(output_dtype(outcome_B, entropy_B_T))


def _shaped(sides: Polarity, alpha_1: float, alpha_2: float) -> torch.Tensor:
    """The shaped rewards; 0 outside the mask."""
    mask_B_T, width = sides.mask_B_T, sides.mask_B_T.shape[1]
    place_B_T = (mask_B_T.cumsum(dim=1) - 1).clamp(min=0)
    cell_B_T = sides.side_B[:, None] * width + place_B_T
    share_B_T = shares(sides.entropy_B_T, sides.rewarded_B[:, None])
    n_cells = 2 * len(sides.side_B) * width
    cells_N = cell_B_T[mask_B_T]
    zeros_C = torch.zeros(n_cells, dtype=torch.float64, device=mask_B_T.device)
    total_C = zeros_C.index_add(0, cells_N, share_B_T[mask_B_T])
    count_C = zeros_C.index_add(0, cells_N, torch.ones_like(share_B_T[mask_B_T]))
    relative_B_T = share_B_T / torch.where(mask_B_T, total_C[cell_B_T], 1.0) * count_C[cell_B_T]
    sign_B_T = torch.where(sides.rewarded_B[:, None], 1.0, -1.0).to(torch.float64)
    return torch.where(mask_B_T, sign_B_T * (alpha_1 + alpha_2 * relative_B_T), 0.0)
