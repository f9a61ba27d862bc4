"""The chain world against a list of all its trajectories, and laws of its credit."""

import math

import pytest
import torch

from verl_credit.credit import MODES
from verl_credit.study.exact_worlds.chain_world import (
    ANSWER,
    FORWARD,
    PRIVATE,
    RIGHT,
    WASTE,
    WASTED,
    exact_gradient,
    first_policy,
    roll,
    values,
)
from verl_credit.study.exact_worlds.fed_credit import FedCredit

WORLDS, QUESTIONS = 2, 3


def chances(hops, seed=0):
    random = torch.Generator().manual_seed(seed)
    return first_policy(hops, WORLDS, QUESTIONS, random).softmax(-1)


def every_trajectory(hops):
    """[(place, wasted, action)] of each path that ends, told action by action."""
    found = []

    def go(path, place, wasted):
        if wasted == 3 or place + wasted == hops + 2:
            found.append((path, place))
            return
        found.append(([*path, (place, wasted, ANSWER)], place))
        if place < hops:
            go([*path, (place, wasted, FORWARD)], place + 1, wasted)
        go([*path, (place, wasted, WASTE)], place, wasted + 1)

    go([], 0, 0)
    return found


@pytest.mark.parametrize("hops", [1, 2])
def test_values_and_gradient_are_those_of_all_trajectories(hops):
    shape = WORLDS * QUESTIONS, hops + 1, WASTED, 3
    shared = torch.zeros(WORLDS, 1, hops + 1, 1, 3, dtype=torch.float64, requires_grad=True)
    private = torch.zeros(WORLDS, QUESTIONS, hops + 1, WASTED, 3, dtype=torch.float64, requires_grad=True)
    base = first_policy(hops, WORLDS, QUESTIONS, torch.Generator().manual_seed(3))
    prob = (base.view(private.shape) + shared + PRIVATE * private).softmax(-1).view(shape)
    value_N, whole_N = torch.zeros(shape[0], dtype=torch.float64), torch.zeros(shape[0], dtype=torch.float64)
    for path, place in every_trajectory(hops):
        chance_N = math.prod((prob[(slice(None), *at)] for at in path), start=torch.ones_like(value_N))
        value_N, whole_N = value_N + chance_N * RIGHT * (place == hops), whole_N + chance_N
    assert whole_N.detach().numpy() == pytest.approx(1, abs=1e-12)
    found_N_P_W1, _ = values(prob.detach())
    assert found_N_P_W1[:, 0, 0].numpy() == pytest.approx(value_N.detach().numpy(), abs=1e-12)
    wanted = torch.autograd.grad(value_N.sum(), (shared, private))
    wanted_R_D = torch.cat([one.view(WORLDS, -1) for one in wanted], dim=1)
    assert torch.allclose(exact_gradient(prob.detach(), WORLDS), wanted_R_D, atol=1e-12)


@pytest.fixture(scope="module")
def rolled():
    prob = chances(3)
    return prob, roll(prob, torch.Generator().manual_seed(1), rollouts=4000)


def with_true_values(paths, value_N_P_W1, **options):
    rolled = paths.rolled(value_N_P_W1, QUESTIONS, torch.arange(WORLDS * QUESTIONS))
    return FedCredit(MODES["turn_gae"], options, "true").advantages(rolled)


@pytest.mark.slow
def test_true_values_at_lam_1_are_the_return_less_v_and_at_lam_0_q_less_v_on_average(rolled):
    prob, paths = rolled
    value_N_P_W1, q_N_P_W_A = values(prob)
    value_B_K1, turn = paths.of_states(value_N_P_W1), paths.turn_B_K1
    whole = with_true_values(paths, value_N_P_W1, lam=1.0)
    assert torch.allclose(whole[turn], (paths.outcome_B[:, None] - value_B_K1)[turn])
    own = with_true_values(paths, value_N_P_W1, lam=0.0)
    searching = turn & (paths.action_B_K1 != ANSWER)
    row, column = searching.nonzero(as_tuple=True)
    at = paths.question_B[row], paths.place_B_K1[row, column], paths.wasted_B_K1[row, column]
    wanted = q_N_P_W_A[(*at, paths.action_B_K1[row, column])] - value_N_P_W1[at]
    assert torch.allclose(own[searching], wanted)


@pytest.mark.parametrize("lam", [0.0, 0.5, 1.0])
def test_the_mean_gradient_of_true_values_is_the_exact_one(rolled, lam):
    """Whatever lam is: true values have no bias."""
    prob, paths = rolled
    credit = with_true_values(paths, values(prob)[0], lam=lam)
    found, exact = paths.gradient(prob, credit, WORLDS) / 4000, exact_gradient(prob, WORLDS)
    assert torch.nn.functional.cosine_similarity(found, exact).min() > 0.995
    assert (found.norm(dim=1) / exact.norm(dim=1)).numpy() == pytest.approx(1, abs=0.05)
