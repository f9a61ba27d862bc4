"""Controls by worked numbers, and Monte Carlo credit against exact values: no noise may be shared with its reference."""

import numpy as np
import pytest

from kit.choice_world import exact_value, found, world
from verl_credit.study.fidelity.agreements import Agreements
from verl_credit.study.fidelity.credits import brought, flat, monte_carlo, per_turn
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


def valued(made, continuations, seed=0):
    """As continuations would come out: each is right with the exact value of its context."""
    drawn, values = np.random.default_rng(seed), {}
    for state in states_of(made):
        right = drawn.random(continuations) < exact_value(*found(state.ids))
        values[digest(state.ids)] = Value(digest(state.ids), "".join("01"[int(one)] for one in right))
    return values


def scored(made, values):
    return score_turns(made, values, [[[0.0] * len(t.steps) for t in group] for group in made])


def test_advantages_are_those_of_the_scored_turns(made):
    values = valued(made, 8)
    assert true_advantages(made, values) == pytest.approx([turn.a_star for turn in scored(made, values)])
    first, second = part_of(values, slice(4)), part_of(values, slice(4, None))
    assert true_advantages(made, first) == pytest.approx([t.a_first for t in scored(made, values)])
    halved, of_half = by_second_half(scored(made, values), values), scored(made, second)
    assert [(t.a_star, t.se, t.variance_after) for t in halved] == [
        (t.a_star, t.se, t.variance_after) for t in of_half
    ]


def test_monte_carlo_is_compared_with_continuations_that_it_does_not_have(made):
    """Corrected for the reference's noise it is the correlation with the exact advantages; with a reference that has its own
    continuations in it, it is more."""
    exact = {digest(state.ids): exact_value(*found(state.ids)) for state in states_of(made)}
    star = []
    for trajectory in (t for group in made for t in group):
        v = [exact[digest(step.state.ids)] for step in trajectory.steps] + [trajectory.reward]
        star += list(np.diff(v))
    apart, shared, wanted = [], [], []
    for seed in range(8):
        values = valued(made, 32, seed)
        credits = {credit.name: credit for credit in monte_carlo(made, values, np.random.default_rng(seed))}
        names = ("4", "8", "16", "16, halved", "16, shuffled")
        assert list(credits) == [f"Monte Carlo, {n}" for n in names]
        credit, turns = flat(credits["Monte Carlo, 16"].advantages), scored(made, values)
        agreements = Agreements(by_second_half(turns, values), one_half=True, resamples=2)
        tool = [turn.kind == "tool" for turn in turns]
        apart.append(agreements.of(credit).pearson.value)
        shared.append(Agreements(turns, resamples=2).of(credit).pearson.value)
        wanted.append(np.corrcoef(np.array(credit)[tool], np.array(star)[tool])[0, 1])
        dealt = agreements.of(flat(credits["Monte Carlo, 16, shuffled"].advantages)).same_turn.value
        assert abs(dealt) < 0.2
    assert np.mean(apart) == pytest.approx(np.mean(wanted), abs=0.04)
    assert np.mean(shared) > np.mean(wanted) + 0.08


@pytest.mark.parametrize("continuations, missing", [(8, []), (12, []), (6, ["8"]), (2, ["4", "8"])])
def test_no_more_continuations_are_asked_for_than_the_credit_takes(made, continuations, missing):
    values = {digest(state.ids): Value("", "01" * (continuations // 2)) for state in states_of(made)}
    credits = monte_carlo(made, values, np.random.default_rng(0))
    assert [c.name for c in credits if c.advantages is None] == [f"Monte Carlo, {n}" for n in missing]
    assert all("--continuations 8 at" in c.reason for c in credits if c.name == "Monte Carlo, 8" and c.reason)


@pytest.mark.slow
@pytest.mark.parametrize("continuations", [8, 12])
def test_parts_of_all_continuations_are_compared_with_the_other_half(made, continuations):
    """The correlation is that with the exact advantages, though the credit takes continuations of its reference."""
    exact = {digest(state.ids): exact_value(*found(state.ids)) for state in states_of(made)}
    star = []
    for trajectory in (t for group in made for t in group):
        star += list(
            np.diff([exact[digest(step.state.ids)] for step in trajectory.steps] + [trajectory.reward])
        )
    crossed, shared, wanted = [], [], []
    for seed in range(12):
        values = valued(made, continuations, seed)
        (credit,) = (
            one for one in monte_carlo(made, values, np.random.default_rng(0)) if one.name == "Monte Carlo, 8"
        )
        first, second = (flat(part) for part in credit.halves)
        assert flat(credit.advantages) == pytest.approx((first + second) / 2)
        if continuations == 8:
            assert flat(credit.advantages) == pytest.approx(np.array(true_advantages(made, values)))
        turns = scored(made, values)
        agreements = Agreements(turns, resamples=2)
        agreement = agreements.of_credit(credit)
        assert agreement.pairs.value is agreement.end_pairs.value is None
        tool = [turn.kind == "tool" for turn in turns]
        crossed.append(agreement.pearson.value)
        shared.append(agreements.of(flat(credit.advantages)).pearson.value)
        wanted.append(np.corrcoef(flat(credit.advantages)[tool], np.array(star)[tool])[0, 1])
    assert np.mean(crossed) == pytest.approx(np.mean(wanted), abs=0.04)
    assert np.mean(shared) > np.mean(wanted) + 0.08


def test_an_article_counts_when_it_is_brought_first():
    def trajectory(*pages):
        states = [State(0, 1, (9, *range(n))) for n in range(len(pages) + 1)]
        steps = [Step(states[n], (1,), states[n + 1], None, (), (found,)) for n, found in enumerate(pages)]
        return Trajectory([*steps, Step(states[-1], (1,), None, 1.0)])

    group = [trajectory(("a", "x"), ("a", "b")), trajectory(("x",), ("b", "a"), ("b",))]
    credit = brought([group], [{"extra_info": {"gold_ids": ["a", "b"]}}])
    assert credit.advantages == [[[4 / 7, 4 / 7, -3 / 7], [-3 / 7, 4 / 7, -3 / 7, -3 / 7]]]
    assert "extra_info.gold_ids" in brought([group], [{"extra_info": None}]).reason
    assert per_turn([group], range(7)) == [[[0, 1, 2], [3, 4, 5, 6]]]
