"""Groups drawn from the exact world, the gradient of each as a run would see it, and the true advantages."""

import torch

from verl_credit.study.fidelity.exact.question import Trajectories, turn_values


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


def true_advantages(trajectories: Trajectories, logits_D: torch.Tensor) -> torch.Tensor:
    """A* of each turn, [N, K1]; 0 past the answer.

        search: V(s_{k+1}) - V(s_k)        answer: r - V(s_n)

    The chance of the outcome is assigned to the answer. A trajectory's A* sum to r - V(s_0).
    """
    before_N_K1 = turn_values(trajectories, logits_D)
    after_N_K1 = torch.nn.functional.pad(before_N_K1[:, 1:], (0, 1))
    ends_N_K1 = torch.arange(before_N_K1.shape[1]) == trajectories.n_turns_N[:, None] - 1
    after_N_K1 = torch.where(ends_N_K1, trajectories.outcome_N[:, None], after_N_K1)
    return torch.where(trajectories.turn_N_K1, after_N_K1 - before_N_K1, 0.0)
