"""The credit of modes on lakes beside exact A*, and values in place of it where the policy sees its history."""

from itertools import pairwise, product

import numpy as np
import pytest

from kit.lake_world import lake_world
from lakes.credit import ANCHORS, GAMMAS, grid_credits, grid_tables
from lakes.measure import measure
from lakes.world import roll
from verl_credit.credit import MODES
from verl_credit.worlds.rollouts.rollout import Start


def measured(context, slippery, **options):
    world, decoder, sampler = lake_world(context, slippery)
    settings = {"repeats": 1, "rollouts": 3, "continuations": 16, "seed": 0} | options
    return measure(world, sampler, decoder, **settings)


def by_name(result):
    return dict(zip([credit.name for credit in result.credits], result.agreements, strict=True))


@pytest.fixture(scope="module", params=[False, True], ids=["deterministic", "slippery"])
def state(request):
    return request.param, measured("state", request.param)


@pytest.mark.slow
def test_the_best_critic_is_a_star_but_for_the_luck(state):
    slippery, result = state
    found = by_name(result)["turn_gae, lam 0, exact V"]
    if slippery:
        assert found.pearson.value < 0.95 and np.abs(result.luck).max() > 0.05
    else:
        assert found.pearson.value == pytest.approx(1) and found.pairs.value == 1
    assert result.reliability.value == pytest.approx(1)
    assert all(z.z is None or abs(z.z) < 4 for z in result.integrity)


def test_every_mode_is_there_or_says_why_not(state):
    _, result = state
    names = {credit.name.split(",")[0] for credit in result.credits}
    assert set(MODES) <= names
    reasons = {credit.name: credit.reason for credit in result.credits if credit.advantages is None}
    assert all(
        "no gold answer" in reasons[name] for name in ("turn-group-v1d", "joint", "separate", "progress")
    )
    assert not {
        "none, grpo",
        "none, rloo",
        "none, reinforce_pp",
        "gigpo, by cell",
        "hgpo, by cell and moves left",
    } & set(reasons)
    assert all((found is None) == (name in reasons) for name, found in by_name(result).items())


def test_a_turn_that_ends_by_moving_is_a_move(state):
    _, result = state
    for turn, after in pairwise(result.turns):
        if turn.trajectory != after.trajectory and turn.outcome == 1:
            assert turn.kind == "tool" and turn.after is None
    gave_up = [turn for turn in result.turns if turn.kind == "ending"]
    assert gave_up and all(turn.outcome == 0 for turn in gave_up)


def test_states_are_compared_where_they_repeat():
    """GiGPO's second term, once by hand: what was earned from a cell on, less the mean over the visits of the cell."""
    world, _, sampler = lake_world("state", False)
    groups = roll(sampler, world, [Start(world.start(0, cell), 12, 0, "rollout") for cell in (6, 9, 10, 14)])
    assert sum(0 < sum(t.reward for t in group) < 12 for group in groups) > 1
    credits = {credit.name: credit.advantages for credit in grid_credits(grid_tables(groups), groups)}
    for (name, anchor), gamma in product(ANCHORS.items(), GAMMAS):
        for number, group in enumerate(groups):
            earned = [
                [t.reward * gamma ** (len(t.steps) - 1 - turn) for turn in range(len(t.steps))] for t in group
            ]
            visits = {}
            for trajectory, of_turns in zip(group, earned, strict=True):
                for step, one in zip(trajectory.steps, of_turns, strict=True):
                    visits.setdefault(anchor(step.state), []).append(one)
            mean = np.mean([t.reward for t in group])
            credit = credits[f"gigpo, by {name}" + (f", gamma {gamma:g}" if gamma < 1 else "")]
            for row, trajectory in enumerate(group):
                wanted = []
                for step, one in zip(trajectory.steps, earned[row], strict=True):
                    others = visits[anchor(step.state)]
                    again = one - np.mean(others) if len(others) > 1 else 0
                    wanted.append(trajectory.reward - mean + again)
                assert credit[number][row] == pytest.approx(wanted)


def test_histories_are_compared_with_the_half_that_a_credit_has_not_seen():
    result = measured("history", False)
    found, held_out = by_name(result), {credit.name: credit.held_out for credit in result.credits}
    assert (
        held_out["turn_gae, lam 0, V by 8"] and held_out["Monte Carlo, 8"] and not held_out["gigpo, by cell"]
    )
    assert found["turn_gae, lam 0, V by 8"] == found["Monte Carlo, 8"]
    assert found["A* by the state alone"].pearson.value == pytest.approx(1, abs=0.1)  # this policy forgets
