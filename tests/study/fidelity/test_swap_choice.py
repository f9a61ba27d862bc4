"""Decisions of a world whose values are known, and what is said of credit that is right, wrong, or from few samples."""

from collections import Counter

import numpy as np
import pytest

from kit.choice_world import exact_value, found, world
from verl_credit.study.fidelity.decisions import (
    ALTERNATIVES,
    Alternative,
    Decision,
    SwapAgreements,
    completed,
    find_decisions,
    worth,
)
from verl_credit.study.fidelity.swaps import monte_carlo, swapped_groups
from verl_credit.study.fidelity.values import Value, part_of
from verl_credit.worlds.rollouts.protocol import State, Step
from verl_credit.worlds.rollouts.rollout import Start, roll
from verl_credit.worlds.rollouts.sampler import digest

QUESTIONS, ROLLOUTS, COMPLETIONS = 30, 4, 4


@pytest.fixture(scope="module")
def groups():
    sampler, protocol, states = world(QUESTIONS)
    return roll(sampler, protocol, [Start(state, ROLLOUTS, 0, "rollout") for state in states])


def find(groups, wanted, seed=0):
    sampler, protocol, _ = world(QUESTIONS)
    return find_decisions(groups, sampler, protocol, wanted=wanted, seed=seed)


@pytest.fixture(scope="module")
def decisions(groups):
    return find(groups, 50)


def states_of(decisions):
    return {a.step.next.ids for d in decisions for a in d.alternatives if a.step.next} | {
        d.state.ids for d in decisions
    }


def exact_values(decisions, half=1000):
    """Values whose halves are both the exact one, to three digits."""
    values = {}
    for ids in states_of(decisions):
        ones = round(half * exact_value(*found(ids)))
        values[digest(ids)] = Value(digest(ids), ("1" * ones + "0" * (half - ones)) * 2)
    return values


def drawn_values(decisions, continuations, seed):
    drawn, values = np.random.default_rng(seed), {}
    for ids in sorted(states_of(decisions)):
        right = drawn.random(continuations) < exact_value(*found(ids))
        values[digest(ids)] = Value(digest(ids), "".join("01"[int(one)] for one in right))
    return values


def q_of(decisions, values):
    return [np.array([worth(a, values) for a in d.alternatives]) for d in decisions]


def repeated(credit):
    """The same behind every completion."""
    return [np.repeat(q_A[:, None], COMPLETIONS, axis=1) for q_A in credit]


def test_decisions_are_searches_of_which_the_policy_proposes_another(groups, decisions):
    assert len(decisions) == 50
    assert max(Counter(d.prompt for d in decisions).values()) == 2
    assert len({d.state.ids for d in decisions}) == 50
    for d in decisions:
        step = groups[d.prompt][d.trajectory].steps[d.turn]
        assert step.next is not None and d.alternatives[0].step == step
        texts = [a.step.turn_ids for a in d.alternatives]
        assert len(set(texts)) == len(texts) > 1
        assert sum(a.times for a in d.alternatives) == ALTERNATIVES
        assert {a.step.state.ids for a in d.alternatives} == {d.state.ids}
    assert find(groups, 50) == decisions and find(groups, 20) == decisions[:20]
    assert find(groups, 50, seed=1) != decisions
    assert 50 < len(find(groups, 1000)) <= 2 * QUESTIONS
    assert any(a.step.next is None for d in decisions for a in d.alternatives)  # it may end, too


def test_an_alternative_goes_on_in_the_place_of_its_trajectory(groups, decisions):
    sampler, protocol, _ = world(QUESTIONS)
    options = {"completions": COMPLETIONS, "seed": 0}
    for decision, ends in zip(
        decisions, completed(decisions, groups, sampler, protocol, **options), strict=True
    ):
        old = groups[decision.prompt]
        for alternative, of_one in zip(decision.alternatives, ends, strict=True):
            for path in of_one:
                assert path.steps[: decision.turn] == old[decision.trajectory].steps[: decision.turn]
                assert path.steps[decision.turn] == alternative.step and path.reward is not None
                follows = [step.next.ids for step in path.steps[:-1]]
                assert follows == [step.state.ids for step in path.steps[1:]]
        new = swapped_groups(old, decision, ends)
        assert len(new) == len(decision.alternatives) * COMPLETIONS
        for number, group in enumerate(new):
            assert group[decision.trajectory] is ends[number // COMPLETIONS][number % COMPLETIONS]
            others = [place for place in range(ROLLOUTS) if place != decision.trajectory]
            assert all(group[place] is old[place] for place in others)
    assert len({end.reward for of_one in ends for end in of_one}) == 2


def test_true_values_choose_rightly_and_their_opposite_wrongly(decisions):
    values = exact_values(decisions)
    agreements, q = SwapAgreements(decisions, values, COMPLETIONS, resamples=50), q_of(decisions, values)
    right = agreements.of(repeated(q))
    for choice in (right.one, right.mean):
        assert (choice.pairs.value, choice.searches.value) == (1, 1)
        assert choice.regret.value == pytest.approx(0, abs=1e-12)
        assert choice.within.value == pytest.approx(1, abs=1e-6)
    assert (right.mean.pairs.n, right.mean.searches.n) == agreements.sure > (50, 10)
    assert right.one.pairs.n == COMPLETIONS * agreements.sure[0] > COMPLETIONS * agreements.sure[1]
    wrong = agreements.of([-one for one in repeated(q)]).mean
    assert wrong.pairs.value == 0 and wrong.within.value == pytest.approx(-1, abs=1e-6)
    assert wrong.regret.value == pytest.approx(np.mean([np.ptp(q_A) for q_A in q]))
    assert wrong.regret.low < wrong.regret.value < wrong.regret.high
    constant = agreements.of(repeated([0 * q_A for q_A in q])).one
    assert constant.pairs.value is None and constant.within.value is None
    assert constant.regret.value == pytest.approx(np.mean([q_A.max() - q_A.mean() for q_A in q]))
    times = [np.array([a.times for a in d.alternatives]) / ALTERNATIVES for d in decisions]
    by_itself = np.mean([q_A.max() - q_A @ share for q_A, share in zip(q, times, strict=True)])
    assert agreements.regret_of_draws(decisions).value == pytest.approx(by_itself)


def test_random_credit_is_right_half_of_the_time(decisions):
    values = exact_values(decisions)
    drawn = np.random.default_rng(0)
    credit = [drawn.standard_normal((len(d.alternatives), 20)) for d in decisions]
    choice = SwapAgreements(decisions, values, 20, resamples=2).of(credit).one
    assert choice.pairs.value == pytest.approx(0.5, abs=0.03) and abs(choice.within.value) < 0.05
    by_chance = np.mean([q_A.max() - q_A.mean() for q_A in q_of(decisions, values)])
    assert choice.regret.value == pytest.approx(by_chance, abs=0.02)


def test_the_mean_of_completions_leaves_their_luck_out(decisions):
    """Credit that is the outcome of the completion: one is noisy, the mean of many is in the order of Q."""
    some = decisions[:12]
    values = exact_values(some)
    drawn, q = np.random.default_rng(0), q_of(some, values)
    credit = [(drawn.random((len(q_A), 150)) < q_A[:, None]).astype(float) for q_A in q]
    found = SwapAgreements(some, values, 150, resamples=2).of(credit)
    assert found.one.pairs.value < 0.9 < 0.98 < found.mean.pairs.value
    assert found.mean.regret.value < 0.02 < found.one.regret.value


def best(worth_A, credit_A):
    """Mean worth of the alternatives with the most credit."""
    return worth_A[np.isclose(credit_A, credit_A.max())].mean()


def test_regret_is_not_flattered_by_luck_that_chose(decisions):
    """Monte Carlo credit of 4: its regret is, on average, that of its choices by the exact values."""
    some = decisions[:12]
    q, measured, wanted, naive = q_of(some, exact_values(some)), [], [], []
    for seed in range(40):
        values = drawn_values(some, 12, seed)
        credit = [monte_carlo(d, values)[0].advantages for d in some]
        agreements = SwapAgreements(some, values, 1, resamples=1)
        measured.append(agreements.of([one[:, None] for one in credit], held_out=True).one.regret.value)
        first, of_all = q_of(some, part_of(values, slice(6))), q_of(some, values)
        wanted.append(np.mean([best(a, f) - best(a, c) for a, f, c in zip(q, first, credit, strict=True)]))
        naive.append(np.mean([a.max() - best(a, c) for a, c in zip(of_all, credit, strict=True)]))
    error, by_all = np.array(measured) - wanted, np.mean(naive) - np.mean(wanted)
    assert abs(error.mean()) < 3 * error.std() / len(error) ** 0.5 < by_all


def test_ends_of_equal_worth_are_no_pair():
    """Their worth is known without an error, and equal: no order is right."""
    state = State(0, 1, (9,))
    after = State(0, 1, (9, 1), 1)
    steps = [Step(state, (1,), after, None), Step(state, (2,), None, 0.0), Step(state, (3,), None, 0.0)]
    decision = Decision(0, 0, 0, [Alternative(step, 1) for step in steps])
    values = {digest(one.ids): Value(digest(one.ids), "1" * 32) for one in (state, after)}
    assert SwapAgreements([decision], values, 1, resamples=1).sure == (2, 0)
