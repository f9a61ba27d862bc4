"""Groups drawn from the exact world, and the gradient of each: what a run would see of them."""

import torch

from verl_credit.study.fidelity.exact.question import Trajectories


def draw_groups(probability_N: torch.Tensor, groups: int, size: int, random: torch.Generator) -> torch.Tensor:
    """Independent groups, int64 [groups, G]."""
    drawn = probability_N.multinomial(groups * size, replacement=True, generator=random)
    return drawn.view(groups, size)


def group_gradients(
    advantage_M_G_K1: torch.Tensor,
    group_M_G: torch.Tensor,
    trajectories: Trajectories,
    logits_D: torch.Tensor,
) -> torch.Tensor:
    """g of each group, [M, D]: what a run would see of it."""
    score_N_K1_D = trajectories.score_N_K1_D(logits_D)
    summed_M_D = torch.einsum("mgk,mgkd->md", advantage_M_G_K1, score_N_K1_D[group_M_G])
    return summed_M_D / group_M_G.shape[1]
