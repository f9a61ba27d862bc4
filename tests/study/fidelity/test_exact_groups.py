"""Groups: their probabilities, and the expected gradient against ordered enumeration and against sampling."""

import itertools
import math

import pytest
import torch

from verl_credit.credit import turn_credit
from verl_credit.study.fidelity.exact.bias import (
    advantages,
    as_world,
    expected_gradient,
    group_probability,
    list_groups,
)
from verl_credit.study.fidelity.exact.operators import turn_credit_of
from verl_credit.study.fidelity.exact.question import TWO_HOPS, list_trajectories


@pytest.mark.parametrize("size", [1, 2, 5])
def test_every_multiset_stands_there_once_and_probabilities_sum_to_1(size):
    probability_N = torch.tensor([0.5, 0.2, 0.2, 0.1], dtype=torch.float64)
    group_M_G = list_groups(4, size)
    assert len(group_M_G) == math.comb(4 + size - 1, size) == len(group_M_G.unique(dim=0))
    assert float(group_probability(group_M_G, probability_N).sum()) == pytest.approx(1, abs=1e-12)


def test_the_probability_of_a_group_by_hand():
    probability_N = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    found = group_probability(torch.tensor([[0, 0, 1], [2, 2, 2], [0, 1, 2]]), probability_N)
    assert found.tolist() == pytest.approx([3 * 0.25 * 0.3, 0.008, 6 * 0.03])


@pytest.mark.slow
def test_the_expected_gradient_is_the_sum_over_ordered_groups():
    """One call of `turn_credit` per ordered pair, autograd for grad log pi: of the code under test the paths alone."""
    trajectories = list_trajectories(TWO_HOPS)
    choices = trajectories.choices
    leaf_D = choices.logits_with_stop(0.3).requires_grad_()
    log_pi_D = torch.cat([leaf_D[choices.state_D == s].log_softmax(0) for s in range(len(choices.states))])
    score = [torch.autograd.grad(x, leaf_D, retain_graph=True)[0] for x in log_pi_D]
    rows, expected_D = range(len(trajectories.outcome_N)), torch.zeros_like(leaf_D)
    paths = [[c for c in path if c >= 0] for path in trajectories.choice_N_K1.tolist()]
    p = [
        float(log_pi_D.detach()[path].sum().exp() * chance)
        for path, chance in zip(paths, trajectories.chance_N, strict=True)
    ]
    for pair in itertools.product(rows, rows):
        at = list(pair)
        n_tool_turns = torch.tensor([len(paths[i]) - 1 for i in at])
        credit = turn_credit(
            trajectories.outcome_N[at],
            trajectories.gain_N_K[at],
            torch.arange(3) < n_tool_turns[:, None],
            torch.zeros(2, dtype=torch.long),
            n_tool_turns_B=n_tool_turns,
            info_gain_norm_mode="turn-group-v1d",
        )
        for row, i in enumerate(at):
            for turn, choice in enumerate(paths[i]):
                advantage = float(credit.advantage_B_K1[row, turn])
                expected_D = expected_D + p[at[0]] * p[at[1]] * advantage * score[choice] / 2
    logits_D = leaf_D.detach()
    group_M_G = list_groups(len(rows), 2)
    found = advantages(turn_credit_of("turn-group-v1d"), as_world(trajectories, logits_D), group_M_G)
    found_D = expected_gradient(found, group_M_G, trajectories, logits_D)
    torch.testing.assert_close(found_D, expected_D.detach(), rtol=0, atol=1e-12)
