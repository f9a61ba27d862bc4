"""Values, true advantages and their integrity in a world whose values are known in closed form."""

import json
from functools import partial

import numpy as np
import pytest

from kit.choice_world import TURNS, exact_value, found, world
from verl_credit.errors import PreflightError
from verl_credit.study.fidelity.agreements import Agreements
from verl_credit.study.fidelity.true_values import martingale, score_turns, states_of, values_of
from verl_credit.worlds.rollouts.rollout import Start, roll
from verl_credit.worlds.rollouts.sampler import digest

QUESTIONS, ROLLOUTS, M = 40, 16, 64


def groups(seed=0):
    sampler, protocol, states = world(QUESTIONS)
    return roll(sampler, protocol, [Start(state, ROLLOUTS, seed, "rollout") for state in states])


def measured(groups, continuations=M, seed=0, **options):
    sampler, protocol, _ = world(QUESTIONS)
    states = states_of(groups)
    return states, values_of(
        states, partial(roll, sampler, protocol), continuations=continuations, seed=seed, **options
    )


def true_star(groups):
    """A* of every turn by the exact values."""
    star = []
    for group in groups:
        for trajectory in group:
            for step in trajectory.steps:
                after = step.reward if step.next is None else exact_value(*found(step.next.ids))
                star.append(after - exact_value(*found(step.state.ids)))
    return np.array(star)


@pytest.fixture(scope="module")
def sample():
    made = groups()
    return made, *measured(made)


@pytest.mark.slow
def test_values_scatter_about_the_exact_ones_as_their_error_says(sample):
    _, states, values = sample
    z = []
    for state in states:
        v = exact_value(*found(state.ids))
        if 0.02 < v < 0.98:
            z.append((values[digest(state.ids)].value - v) / (v * (1 - v) / M) ** 0.5)
    assert len(z) > 100
    assert abs(np.mean(z)) < 4 / len(z) ** 0.5 and abs(np.std(z) - 1) < 4 / (2 * len(z)) ** 0.5


def test_halves_are_independent(sample):
    _, states, values = sample
    exact = np.array([exact_value(*found(state.ids)) for state in states])
    errors = np.array([values[digest(state.ids)].halves for state in states]) - exact[:, None]
    errors = errors[(exact > 0.02) & (exact < 0.98)]
    assert abs(np.corrcoef(errors.T)[0, 1]) < 4 / len(errors) ** 0.5
    assert np.allclose(errors.mean(), errors[:, 0].mean() / 2 + errors[:, 1].mean() / 2)


def test_errors_of_neighbouring_contexts_are_independent(sample):
    """Trajectories through the same context share its forward, not their draws."""
    made, _, values = sample

    def error(state):
        return values[digest(state.ids)].value - exact_value(*found(state.ids))

    pairs = {(s.state.ids, s.next.ids): (s.state, s.next) for g in made for t in g for s in t.steps if s.next}
    x, y = np.array([(error(a), error(b)) for a, b in pairs.values()]).T
    assert abs(np.corrcoef(x, y)[0, 1]) < 4 / len(x) ** 0.5


def test_true_advantages(sample):
    made, _, values = sample
    turns, star = score_turns(made, values), true_star(made)
    z = (np.array([turn.a_star for turn in turns]) - star) / np.array([turn.se for turn in turns])
    assert np.abs(z).max() < 6 and abs((z**2).mean() - 1) < 0.25
    last = [turns[i] for i in range(len(turns)) if turns[i].kind == "ending"]
    assert len(last) == QUESTIONS * ROLLOUTS and all(t.after is None and t.gain is None for t in last)
    whole = sum(turn.a_star for turn in turns if (turn.prompt, turn.trajectory) == (3, 5))
    start = values[next(t for t in turns if t.prompt == 3).before].value
    assert whole == pytest.approx(made[3][5].reward - start)


def test_what_is_0_on_average(sample):
    made, _, values = sample
    scores = martingale(score_turns(made, values))
    assert [score.name for score in scores] == [*(f"turn {k}" for k in range(1, TURNS + 1)), "r - V(s_0)"]
    assert all(abs(score.z) < 3.5 for score in scores)
    tools = [turn for turn in score_turns(made, values) if turn.kind == "tool"]
    assert martingale(tools)[0].z > 3.5  # of tool turns alone it is not: that it searched at all is good news


@pytest.mark.slow
def test_exact_credit_agrees_whatever_the_noise_of_the_values(sample):
    """The correction gives back the correlation with the exact advantages: 1 for those themselves."""
    made, _, _ = sample
    star = true_star(made)
    noisy = star + np.random.default_rng(0).normal(0, star.std(), len(star))
    found = []
    for seed in range(6):
        rough = score_turns(made, measured(made, continuations=16, seed=seed)[1])
        agreements = Agreements(rough, resamples=200)
        own = agreements.of(star)
        assert agreements.reliability.value < 0.85
        assert own.pearson.low < own.pearson.value < own.pearson.high
        found.append((own.pearson.value, own.same_turn.value, agreements.of(noisy).pearson.value))
    tool = np.array([turn.kind == "tool" for turn in rough])
    wanted = np.corrcoef(noisy[tool], star[tool])[0, 1]
    assert np.mean(found, axis=0) == pytest.approx([1, 1, wanted], abs=0.05)


def test_sure_pairs_are_sure(sample):
    made, _, values = sample
    agreements = Agreements(score_turns(made, values), resamples=50)
    assert min(agreements.sure) > 50
    right, wrong = agreements.of(true_star(made)), agreements.of(-true_star(made))
    assert min(right.pairs.value, right.end_pairs.value) > 0.995
    assert max(wrong.pairs.value, wrong.end_pairs.value) < 0.005


@pytest.mark.slow
def test_a_context_is_valued_once_and_alike_in_any_company(sample):
    made, states, values = sample
    assert len(values) == len(states) == len({state.ids for state in states})
    one = measured(made[:1])[1]
    assert one.items() <= values.items()
    sampler, protocol, _ = world(QUESTIONS)
    alone = values_of(states[7:8], partial(roll, sampler, protocol), continuations=M, seed=0)
    assert alone.items() <= values.items()
    assert measured(made, seed=1)[1] != values


@pytest.mark.slow
def test_values_go_on_where_they_were_cut_off(sample, tmp_path):
    made, states, values = sample
    path = tmp_path / "values.jsonl"
    assert measured(made, path=path)[1] == values
    lines = path.read_text().splitlines()
    path.write_text("\n".join(lines[:20]) + "\n" + lines[20][:15])  # killed while it wrote
    sampler, protocol, _ = world(QUESTIONS)
    rolled = []

    def counted(*args, **kwargs):
        rolled.append(args)
        return roll(sampler, protocol, *args, **kwargs)

    assert values_of(states, counted, continuations=M, seed=0, path=path) == values and rolled
    assert sorted(map(json.dumps, map(json.loads, path.read_text().splitlines()))) == sorted(
        map(json.dumps, map(json.loads, lines))
    )
    rolled.clear()
    assert values_of(states, counted, continuations=M, seed=0, path=path) == values and not rolled


def test_another_number_of_continuations_is_refused(tmp_path):
    sampler, protocol, states = world(1)
    path = tmp_path / "values.jsonl"
    values_of(states, partial(roll, sampler, protocol), continuations=4, seed=0, path=path)
    with pytest.raises(PreflightError, match="by 4 continuations; expected --continuations 8"):
        values_of(states, partial(roll, sampler, protocol), continuations=8, seed=0, path=path)
