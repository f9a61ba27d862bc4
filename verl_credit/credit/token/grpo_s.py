"""GRPO-S: rewards shaped per trajectory by its mean entropy."""

import torch

from verl_credit.credit.checks import output_dtype
from verl_credit.credit.groups import EPS, row_mean, z_score
from verl_credit.credit.operator import Operator
from verl_credit.credit.token.gtpo_canonical import polarity, shares


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
    eps: float = EPS,
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
    sides = polarity(
        outcome_B, entropy_B_T, mask_B_T, group_B, entropy_clip=entropy_clip, row_valid_B=row_valid_B
    )
    entropy_B = row_mean(sides.entropy_B_T, sides.mask_B_T).squeeze(1)
    share_B = shares(entropy_B, sides.rewarded_B)
    used_B, side_B = sides.in_use_B, sides.side_B
    zeros_C = torch.zeros(2 * len(side_B), dtype=torch.float64, device=side_B.device)
    total_C = zeros_C.index_add(0, side_B[used_B], share_B[used_B])
    count_C = zeros_C.index_add(0, side_B[used_B], torch.ones_like(share_B[used_B]))
    relative_B = share_B / torch.where(used_B, total_C[side_B], 1.0) * count_C[side_B]
    shaped_B = torch.where(sides.rewarded_B, 1.0, -1.0) * (beta_1 + beta_2 * relative_B)
    z_B = z_score(shaped_B, sides.group_B, member_N=used_B, ddof=ddof, variance_floor=0.0, eps=eps)
    return torch.where(used_B, z_B, 0.0).to(output_dtype(outcome_B, entropy_B_T))


OPERATOR = Operator(
    name="grpo_s",
    level="canonical",
    function=grpo_s,
    reads=("rewards", "groups", "entropy"),
    reduces_to="normalised +1 / -1 rewards at beta_2 0",
    bias="own sample in mean and std",
    departures="groups that are all rewarded or all not give 0",
    source="2508.04349",
)
