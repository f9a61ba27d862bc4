"""Rollouts of several outputs, all listed: what a reset or a sub-agent does to the expected gradient of every credit."""

from functools import cache
from pathlib import Path

import pytest
import torch
from verl.trainer.ppo.core_algos import compute_rloo_outcome_advantage

from kit import session_gradients
from kit.session_gradients import AGENTS, CREDITS, takes
from kit.session_world import Rollout, delegating, forgetful

PAGE = Path(__file__).parents[3] / "docs" / "agent-loops.md"
RLOO = CREDITS["`none`, `advantage_mode=rloo`"]
World = cache(session_gradients.World)


def test_a_reset_makes_two_histories_one_context_and_values_by_hand():
    """After the reset the atlas is right with .3 + .3 x .6 + .4 x .55 = .7, and the blog with .3 x .4 + .4 x .45 = .3. The
    policy comes there by the atlas with .4 x .7 = .28 and by the blog with .35 x .6 = .21."""
    world = World()
    assert float(world.probability_N.sum()) == pytest.approx(1, abs=1e-12)
    after_reset = {tuple(rollout.choices[:2]) for rollout in world.rollouts if len(rollout.outputs) == 3}
    atlas, blog = sorted(after_reset)
    mean = (0.28 * 0.7 + 0.21 * 0.3) / 0.49
    assert [world.values(whole=False)[before] for before in (atlas, blog)] == pytest.approx([mean, mean])
    assert [world.values(whole=True)[before] for before in (atlas, blog)] == pytest.approx([0.7, 0.3])
    assert world.values(whole=False)[()] == pytest.approx(0.4 * 0.3 + 0.28 * 0.7 + 0.21 * 0.3)


CASES = [
    (name, agent, rewards)
    for name, given in CREDITS.items()
    for agent in AGENTS.values()
    for rewards in (False, True)
    if takes(agent, **given)
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "agent", "rewards"), CASES)
def test_the_expected_gradient_is_that_of_the_same_rollouts_with_one_output(name, agent, rewards):
    world, given = World(agent, rewards=rewards), CREDITS[name]
    found_D = world.expected(**given)
    torch.testing.assert_close(found_D, world.expected(Rollout.as_one, **given), rtol=0, atol=1e-12)
    assert float(found_D.norm()) > 0.1


UNBIASED = [
    "`turn-group-unbiased`",
    "`leave_one_out`",
    "`turn_gae`, lam 1",
    "`turn_gae`, lam 0, V of the whole history",
]


@pytest.mark.slow
@pytest.mark.parametrize("agent", AGENTS.values())
@pytest.mark.parametrize("rewards", [False, True])
def test_what_is_unbiased_stays_so(agent, rewards):
    world = World(agent, rewards=rewards)
    unbiased = [CREDITS[name] for name in UNBIASED] + ([] if rewards else [RLOO])
    for given in (given for given in unbiased if takes(agent, **given)):
        torch.testing.assert_close(world.expected(**given), world.true_D, rtol=0, atol=1e-9)


@pytest.mark.slow
def test_in_groups_of_three_rloo_is_unbiased_too():
    world = World(delegating, 3)
    torch.testing.assert_close(world.expected(**RLOO), world.true_D, rtol=0, atol=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("agent", "cosine", "bias"), [(forgetful, 0.98954, 0.14426), (delegating, 0.97881, 0.20475)]
)
def test_outputs_that_count_as_rollouts_turn_the_gradient(agent, cosine, bias):
    """That is what verl's own rloo does with them."""
    world = World(agent)
    assert world.compared(siblings=True, **RLOO) == pytest.approx((cosine, bias), abs=1e-5)
    [batch] = world.batches(Rollout.as_returned, True, len(world.group_M_G))
    rewards_B_T = torch.zeros(batch.turns.turn_ids_B_T.shape).double()
    rewards_B_T[:, 0] = batch.outcome_B
    mask_B_T, uids = batch.turns.response_mask_B_T, batch.group_B.tolist()
    of_verl_B_T, _ = compute_rloo_outcome_advantage(rewards_B_T, mask_B_T, uids)
    found_N = batch.advantages(world.run(**RLOO), world.values(whole=False))
    torch.testing.assert_close(found_N, of_verl_B_T[batch.row_N, 0], rtol=0, atol=1e-9)


@pytest.mark.slow
def test_a_state_by_the_prefix_of_its_output_is_the_context():
    given = CREDITS["`gigpo`"]
    by_prefix_D = World().expected(turn_anchor="prefix", **given)
    torch.testing.assert_close(by_prefix_D, World().expected(**given), rtol=0, atol=1e-12)


@pytest.mark.slow
def test_the_page_has_the_table():
    assert session_gradients.table() in PAGE.read_text(encoding="utf-8")
