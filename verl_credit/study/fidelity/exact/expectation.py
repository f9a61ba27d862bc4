"""The expected gradient of an operator: a sum over all groups of trajectories, with no sampling.

Groups are multisets with their multinomial probabilities. One token stands for a turn: advantage_B_T is the turns'.
"""

from __future__ import annotations

from itertools import combinations_with_replacement

import torch

from verl_credit.credit.laws.world import World
from verl_credit.study.fidelity.exact.operators import Credit
from verl_credit.study.fidelity.exact.trajectories import Trajectories, turn_values


def as_world(trajectories: Trajectories, logits_D: torch.Tensor) -> World:
    """N rows, a prompt each; K = the question's turns - 1.

    State scores are the potentials after each search (the answer is not scored), values are exact V of the outcome, and an
    anchor is the place: visits at different turns are the same state.
    """
    t, rows = trajectories, len(trajectories.outcome_N)
    turn_N_K1, columns_K1 = t.turn_N_K1, torch.arange(t.turn_N_K1.shape[1])
    searched_N_K = columns_K1[:-1] < t.n_turns_N[:, None] - 1
    place_S = torch.tensor([list(t.choices.question.places).index(name) for name, _ in t.choices.states])
    after_N_K = torch.where(searched_N_K, t.potential_N_K1[:, 1:], torch.nan)
    return World(
        outcome_B=t.outcome_N,
        group_B=torch.arange(rows),
        valid_B=torch.ones(rows, dtype=torch.bool),
        gain_B_K=t.gain_N_K,
        has_gain_B_K=searched_N_K,
        turn_ids_B_T=torch.where(turn_N_K1, columns_K1, -1),
        mask_B_T=turn_N_K1,
        log_prob_B_T=t.turn_log_prob_N_K1(logits_D),
        entropy_B_T=torch.where(turn_N_K1, t.choices.entropy_S(logits_D)[t.state_N_K1], 0.0),
        planning_B_T=torch.zeros_like(turn_N_K1),
        anchor_B_K1=torch.where(turn_N_K1, place_S[t.state_N_K1], -1),
        value_B_K1=turn_values(t, logits_D),
        bootstrap_B=torch.zeros(rows, dtype=torch.float64),
        state_score_B_K1=torch.nn.functional.pad(after_N_K, (0, 1), value=torch.nan),
        initial_score_B=t.potential_N_K1[:, 0],
        turn_tokens_B_K1=turn_N_K1.long(),
        result_turn_B=torch.where(t.n_turns_N > 1, 0, -1),
    )


def in_groups(world: World, group_M_G: torch.Tensor) -> World:
    """The groups' rows one after the other, each group as a separate prompt."""
    groups, size = group_M_G.shape
    prompt_B = torch.arange(groups).repeat_interleave(size)
    return world.rows(group_M_G.flatten()).but(group_B=prompt_B)


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


def advantages(credit: Credit, world: World, group_M_G: torch.Tensor) -> torch.Tensor:
    """The operator's advantage of every turn of every row of every group, float64 [M, G, K1]; 0 past the answer.

    An operator whose scope is the batch gets one group a call. Errors: ValueError for an advantage that is not finite.
    """
    step = 1 if credit.scope == "batch" else GROUPS_PER_CALL
    parts = [
        credit.run(in_groups(world, group_m_G)).advantage_B_T.double() for group_m_G in group_M_G.split(step)
    ]
    advantage_M_G_K1 = torch.cat(parts).view(*group_M_G.shape, -1)
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
