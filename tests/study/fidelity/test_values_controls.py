"""Controls by worked numbers, and Monte Carlo credit against exact values: no noise may be shared with its reference."""

from itertools import chain

import numpy as np
import pytest

from kit.choice_world import drawn_values, exact_value, found, world
from verl_credit.study.fidelity.agreements import Agreements
from verl_credit.study.fidelity.credits import first_brought, monte_carlo
from verl_credit.study.fidelity.true_values import (
    Value,
    by_second_half,
    part_of,
    score_turns,
    states_of,
    true_advantages,
)
from verl_credit.worlds.rollouts.protocol import State, Step
from verl_credit.worlds.rollouts.rollout import Start, Trajectory, roll
from verl_credit.worlds.rollouts.sampler import digest

QUESTIONS, ROLLOUTS = 40, 16


@pytest.fixture(scope="module")
def made():
    sampler, protocol, states = world(QUESTIONS)
    return roll(sampler, protocol, [Start(state, ROLLOUTS, 0, "rollout") for state in states])


@pytest.mark.slow
def test_advantages_are_those_of_the_scored_turns(made):
    values = drawn_values(made, 8)
    turns = score_turns(made, values)
    assert true_advantages(made, values) == pytest.approx([turn.a_star for turn in turns])
    first, second = part_of(values, slice(4)), part_of(values, slice(4, None))
    assert true_advantages(made, first) == pytest.approx([t.a_first for t in turns])
    halved, of_half = by_second_half(turns, values), score_turns(made, second)
    assert [(t.a_star, t.se, t.variance_after) for t in halved] == [
        (t.a_star, t.se, t.variance_after) for t in of_half
    ]


@pytest.mark.slow
def test_monte_carlo_is_compared_with_continuations_that_it_does_not_have(made):
    """Corrected for the reference's noise it is the correlation with the exact advantages; with a reference that has its own
    continuations in it, it is more."""
    star_N = []
    for trajectory in chain(*made):
        v = [exact_value(*found(step.state.ids)) for step in trajectory.steps]
        star_N += list(np.diff([*v, trajectory.reward]))
    apart, shared, wanted = [], [], []
    for seed in range(8):
        values = drawn_values(made, 32, seed)
        turns = score_turns(made, values)
        credits = {credit.name: credit for credit in monte_carlo(made, values, np.random.default_rng(seed))}
        names = ("4", "8", "16", "16, halved", "16, shuffled")
        assert list(credits) == [f"Monte Carlo, {one}" for one in names]
        credit_N, dealt_N = (credits[f"Monte Carlo, {one}"].advantage_N for one in ("16", "16, shuffled"))
        agreements = Agreements(by_second_half(turns, values), one_half=True, resamples=2)
        tool_N = np.array([turn.kind == "tool" for turn in turns])
        apart.append(agreements.of(credit_N).pearson.value)
        shared.append(Agreements(turns, resamples=2).of(credit_N).pearson.value)
        wanted.append(np.corrcoef(credit_N[tool_N], np.array(star_N)[tool_N])[0, 1])
        assert abs(agreements.of(dealt_N).same_turn.value) < 0.2
    assert np.mean(apart) == pytest.approx(np.mean(wanted), abs=0.04)
    assert np.mean(shared) > np.mean(wanted) + 0.08


@pytest.mark.parametrize("continuations, missing", [(16, []), (12, ["8"]), (6, ["4", "8"])])
def test_no_more_continuations_are_asked_for_than_the_credit_takes(made, continuations, missing):
    values = {digest(state.ids): Value("", "01" * (continuations // 2)) for state in states_of(made)}
    credits = monte_carlo(made, values, np.random.default_rng(0))
    assert [c.name for c in credits if c.advantage_N is None] == [f"Monte Carlo, {n}" for n in missing]
    assert all(
        "--continuations 16 at" in c.reason for c in credits if c.name == "Monte Carlo, 8" and c.reason
    )


def test_an_article_counts_when_it_is_brought_first():
    def trajectory(*pages):
        states = [State(0, 1, (9, *range(n))) for n in range(len(pages) + 1)]
        steps = [Step(states[n], (1,), states[n + 1], None, (), (found,)) for n, found in enumerate(pages)]
        return Trajectory([*steps, Step(states[-1], (1,), None, 1.0)])

    groups = [[trajectory(("a", "x"), ("a", "b")), trajectory(("x",), ("b", "a"), ("b",))]]
    brought = first_brought(groups, [{"extra_info": {"gold_ids": ["a", "b"]}}])
    assert brought == [True, True, False, False, True, False, False]
    assert first_brought(groups, [{"extra_info": None}]) is None
