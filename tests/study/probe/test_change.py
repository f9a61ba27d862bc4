"""The change of entropy by importance sampling against the change that the list of all sequences has."""

from __future__ import annotations

import pytest
import torch

from kit.exact_policies import flat, tabular, two_layers
from verl_credit.credit.entropy_change import entropy_change
from verl_credit.credit.entropy_gradient import Tokens
from verl_credit.study.probe.policy import Sampling, moved, observe
from verl_credit.study.probe.prediction import log_log_slope

POLICIES = {
    "tabular": tabular(seed=3),
    "two_layers": two_layers(seed=1),
    "nucleus": tabular(Sampling(0.7, 0.9), seed=3),
}


def direction_of(policy):
    """At random, and up the entropy."""
    generator = torch.Generator().manual_seed(1)
    up = policy.gradient(policy.entropy)
    return {name: 10 * g + torch.randn(g.shape, generator=generator).double() for name, g in up.items()}


def rows_of(tokens, drawn_B):
    return Tokens(tokens.log_prob_B_T[drawn_B], tokens.entropy_B_T[drawn_B])


def change(policy, after, drawn_B):
    before, later = rows_of(policy.values(), drawn_B), rows_of(policy.values(after), drawn_B)
    return entropy_change(before, later, policy.written_S_T[drawn_B], torch.arange(len(drawn_B)))


@pytest.mark.parametrize("name", POLICIES)
def test_after_a_step_the_policy_is_read_under_the_nucleus_of_its_rollouts(name):
    policy = POLICIES[name]
    after = moved(policy.parameters, direction_of(policy), 1.0)
    found, expected = observe(policy, len(policy.sequences), 9, after), policy.values(after)
    torch.testing.assert_close(found.log_prob_B_T, expected.log_prob_B_T, rtol=0, atol=1e-14)
    torch.testing.assert_close(found.entropy_B_T, expected.entropy_B_T, rtol=0, atol=1e-14)
    assert float(policy.probability_S(after).sum()) == pytest.approx(policy.prompts)


@pytest.mark.parametrize("name", POLICIES)
def test_many_rollouts_find_the_exact_change(name):
    policy = POLICIES[name]
    after = moved(policy.parameters, direction_of(policy), 0.2)
    exact = float(policy.entropy(after) - policy.entropy())
    drawn_B = policy.draw(torch.Generator().manual_seed(0), 20_000, 1)[0]
    found = change(policy, after, drawn_B)
    assert abs(found.change - exact) < 4 * found.se
    assert found.se < 0.2 * abs(exact)
    assert 0.5 * 20_000 < found.ess < 20_000
    assert found.clipped == 0


ETAS = [10**x for x in (-4.5, -4.25, -4.0, -3.75, -3.5)]


@pytest.mark.parametrize("name", POLICIES)
def test_small_steps_have_slope_one_and_the_size_that_first_order_says(name):
    """The change on all sequences, and on one batch of rollouts, against eta times the slope."""
    policy = POLICIES[name]
    direction = direction_of(policy)
    slope = float(flat(policy.gradient(policy.entropy)) @ flat(direction))
    drawn_B = policy.draw(torch.Generator().manual_seed(1), 64, 1)[0]
    exact, sampled = [], []
    for eta in ETAS:
        after = moved(policy.parameters, direction, eta)
        exact.append(float(policy.entropy(after) - policy.entropy()))
        sampled.append(change(policy, after, drawn_B).change)
    assert exact == pytest.approx([eta * slope for eta in ETAS], rel=0.01)
    for changes in (exact, sampled):
        assert log_log_slope(ETAS, changes) == pytest.approx(1, abs=0.02)
