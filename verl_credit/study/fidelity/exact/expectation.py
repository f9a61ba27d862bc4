"""The expected gradient of an operator: a sum over all groups of trajectories, with no sampling."""

from __future__ import annotations

import torch

from verl_credit.credit.laws.world import World
from verl_credit.study.fidelity.exact.batch import in_groups
from verl_credit.study.fidelity.exact.groups import GROUPS_PER_CALL, group_probability
from verl_credit.study.fidelity.exact.subjects import Credit
from verl_credit.study.fidelity.exact.trajectories import Trajectories


def advantages(credit: Credit, world: World, group_M_G: torch.Tensor) -> torch.Tensor:
    """The operator's advantage of every turn of every row of every group, float64 [M, G, K1]; 0 past the answer.

    An operator whose scope is the batch gets one group a call. Errors: ValueError for an advantage that is not finite.
    """
    step = 1 if credit.scope == "batch" else GROUPS_PER_CALL
    found = [
        credit.run(in_groups(world, group_m_G)).advantage_B_T.double() for group_m_G in group_M_G.split(step)
    ]
    advantage_M_G_K1 = torch.cat(found).view(*group_M_G.shape, -1)
    if not advantage_M_G_K1.isfinite().all():
        raise ValueError(f"{credit.name}: an advantage is not finite; expected finite numbers in every group")
    return advantage_M_G_K1


def expected_gradient(
    advantage_M_G_K1: torch.Tensor,
    group_M_G: torch.Tensor,
    trajectories: Trajectories,
    logits_D: torch.Tensor,
) -> torch.Tensor:
    """E[g] over groups drawn from the policy, [D].

        g = 1/G sum over rows of sum over turns of A grad log pi(turn)        (seq-mean-token-sum, unclipped, on-policy)

    Groups must be all multisets of one size (`list_groups`).
    """
    weight_M = group_probability(group_M_G, trajectories.probability_N(logits_D)) / group_M_G.shape[1]
    credited_N_K1 = torch.zeros(trajectories.choice_N_K1.shape, dtype=torch.float64)
    credited_N_K1.index_add_(
        0, group_M_G.flatten(), (weight_M[:, None, None] * advantage_M_G_K1).flatten(0, 1)
    )
    return torch.einsum("nk,nkd->d", credited_N_K1, trajectories.score_N_K1_D(logits_D))


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
