"""The enumerated questions: probabilities, values, advantages and the true gradient, each found in a second way."""

import pytest
import torch

from kit.drawn_groups import true_advantages
from verl_credit.study.fidelity.exact.operators import Expected, gradient, reward
from verl_credit.study.fidelity.exact.question import (
    QUESTIONS,
    TWO_HOPS,
    Place,
    Question,
    list_trajectories,
    turn_values,
    values,
)

STOPS = (0.1, 0.5, 0.9)


@pytest.fixture(params=[(name, stop) for name in QUESTIONS for stop in STOPS], ids=str)
def case(request):
    name, stop = request.param
    trajectories = list_trajectories(QUESTIONS[name])
    noise = torch.randn(
        len(trajectories.choices.actions), generator=torch.Generator().manual_seed(1), dtype=torch.float64
    )
    return trajectories, trajectories.choices.logits_with_stop(stop) + 0.3 * noise


def test_probabilities_sum_to_1(case):
    trajectories, logits_D = case
    assert float(trajectories.probability_N(logits_D).sum()) == pytest.approx(1, abs=1e-12)


def test_values_by_hand():
    """Two hops, stop .5: both .5 (1) + .5 (.5) = .75 at turn 2; bridge .1 + .375 at turn 1; at turn 2 the last search
    finds both at turn 3, where only the answer is left: .1 + .5 = .6; distractor .5 x .6 = .3."""
    choices = list_trajectories(TWO_HOPS).choices
    value_S, q_D = values(choices, choices.logits_with_stop(0.5))
    found = {state: round(float(value), 12) for state, value in zip(choices.states, value_S, strict=True)}
    assert found["both", 2] == 0.75
    assert found["bridge", 1] == 0.475
    assert found["bridge", 2] == 0.6
    assert found["distractor", 1] == 0.3
    assert found["question", 0] == pytest.approx(0.5 * 0.2 + 0.3 * 0.475 + 0.2 * 0.3)
    named = {
        (choices.states[s], a): float(q)
        for s, a, q in zip(choices.state_D.tolist(), choices.actions, q_D, strict=True)
    }
    assert named[("question", 0), "stop"] == 0.2
    assert named[("question", 0), "bridge"] == pytest.approx(0.475)


def test_the_value_of_a_state_is_the_mean_outcome_of_the_trajectories_through_it(case):
    trajectories, logits_D = case
    p_N = trajectories.probability_N(logits_D)
    value_S, _ = values(trajectories.choices, logits_D)
    for state, value in enumerate(value_S):
        through_N = p_N * (trajectories.state_N_K1 == state).any(1)
        assert float(through_N @ trajectories.outcome_N / through_N.sum()) == pytest.approx(
            float(value), abs=1e-12
        )


def test_values_are_a_martingale(case):
    """The mean A* of every turn number is 0, given the state, too; a trajectory's A* sum to r - V(s_0)."""
    trajectories, logits_D = case
    p_N = trajectories.probability_N(logits_D)
    advantage_N_K1 = true_advantages(trajectories, logits_D)
    torch.testing.assert_close(p_N @ advantage_N_K1, torch.zeros_like(advantage_N_K1[0]), rtol=0, atol=1e-12)
    for state in range(len(trajectories.choices.states)):
        here_N_K1 = trajectories.state_N_K1 == state
        assert float((p_N[:, None] * advantage_N_K1)[here_N_K1].sum()) == pytest.approx(0, abs=1e-12)
    start_N = turn_values(trajectories, logits_D)[:, 0]
    torch.testing.assert_close(advantage_N_K1.sum(1), trajectories.outcome_N - start_N)


def test_the_policy_gradient_theorem_gives_the_gradient(case):
    """grad E[r] = E[sum over turns of A*_k grad log pi_k]."""
    trajectories, logits_D = case
    exact_D = gradient(reward, trajectories, logits_D, 8)
    weight_N_K1 = trajectories.probability_N(logits_D)[:, None] * true_advantages(trajectories, logits_D)
    by_theorem_D = torch.einsum("nk,nkd->d", weight_N_K1, trajectories.score_N_K1_D(logits_D))
    torch.testing.assert_close(by_theorem_D, exact_D, rtol=0, atol=1e-12)


def test_expectations_by_hand():
    """Stop .25: .75 of the trajectories search and earn .4; with three turns .75 of these search again and lose .5."""
    places = {
        "a": Place(0.2, 0.5, {"q": ("b", 1.0)}),
        "b": Place(0.6, 1.0, {"q": ("c", 1.0)}),
        "c": Place(0.1, 0.0),
    }
    for turns, gain, discounted, n_turns in (
        (2, 0.75 * 0.4, 0.75 * 0.4, 1.75),
        (3, 0.75 * (0.4 - 0.75 * 0.5), 0.75 * (0.4 - 0.5 * 0.75 * 0.5), 1 + 0.75 + 0.75**2),
    ):
        trajectories = list_trajectories(Question("q", places, "a", turns))
        probability_N = trajectories.probability_N(trajectories.choices.logits_with_stop(0.25))
        expected = Expected(trajectories, probability_N)
        assert float(expected.gain()) == pytest.approx(gain)
        assert float(expected.gain(0.5)) == pytest.approx(discounted)
        assert float(expected.turns) == pytest.approx(n_turns)
