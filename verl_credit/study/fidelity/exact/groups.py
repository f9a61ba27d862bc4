"""All groups of G trajectories: multisets, with their multinomial probabilities."""

from __future__ import annotations

from itertools import combinations_with_replacement

import torch

GROUPS_PER_CALL = 4096  # an operator's tables of so many groups fit the caches


def list_groups(n: int, size: int) -> torch.Tensor:
    """Every multiset of ``size`` of n trajectories, sorted, int64 [M, G]; M = (n + size - 1 choose size)."""
    if n < 1 or size < 1:
        raise ValueError(f"n={n}, size={size}; expected at least one trajectory and one row per group")
    return torch.tensor(list(combinations_with_replacement(range(n), size)))


def group_probability(group_M_G: torch.Tensor, probability_N: torch.Tensor) -> torch.Tensor:
    """P(multiset) = G! / product of n_i! x product of p_i^n_i, [M]; sums to 1.

    The order of a group's rows is left out: an operator's expected gradient does not depend on it.
    """
    size = group_M_G.shape[1]
    counts_M_N = torch.zeros(len(group_M_G), len(probability_N), dtype=torch.float64)
    counts_M_N.scatter_add_(1, group_M_G, torch.ones_like(group_M_G, dtype=torch.float64))
    log_orders_M = torch.lgamma(torch.tensor(size + 1.0, dtype=torch.float64)) - torch.lgamma(
        counts_M_N + 1
    ).sum(1)
    return log_orders_M.exp().round() * probability_N[group_M_G].prod(1)


def draw_groups(probability_N: torch.Tensor, groups: int, size: int, random: torch.Generator) -> torch.Tensor:
    """Independent groups, int64 [groups, G]."""
    drawn = probability_N.multinomial(groups * size, replacement=True, generator=random)
    return drawn.view(groups, size)
