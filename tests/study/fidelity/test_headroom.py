"""What true values would win: credit by worked laws, and the answer in one sentence."""

from itertools import chain, islice

import numpy as np
import pytest
import torch

from kit.choice_world import drawn_values, world
from verl_credit.credit.turn.turn_credit import BatchTables
from verl_credit.study.fidelity.alignment import GradientAgreement
from verl_credit.study.fidelity.credits import monte_carlo
from verl_credit.study.fidelity.headroom import LAMS, headroom, name_of, true_values
from verl_credit.study.fidelity.true_values import part_of, true_advantages
from verl_credit.study.fidelity.turn_tables import TurnTables
from verl_credit.study.stats import Measure
from verl_credit.worlds.rollouts.rollout import Start, roll
from verl_credit.worlds.rollouts.sampler import digest

CONTINUATIONS = 12


@pytest.fixture(scope="module")
def groups():
    sampler, protocol, states = world(6)
    return roll(sampler, protocol, [Start(state, 4, 0, "rollout") for state in states])


@pytest.fixture(scope="module")
def values(groups):
    return drawn_values(groups, CONTINUATIONS, seed=1)


@pytest.fixture(scope="module")
def credits(groups, values):
    rows = [*chain(*groups)]
    tools = torch.tensor([len(row.steps) - 1 for row in rows])
    shape = len(rows), int(tools.max())
    batch = BatchTables(
        outcome_B=torch.tensor([row.reward for row in rows], dtype=torch.float64),
        # Gains are no part of what V is the chance of.
        reward_B_K=torch.full(shape, 7.0).double(), has_reward_B_K=torch.arange(shape[1]) < tools[:, None],
        group_B=torch.arange(6).repeat_interleave(4), valid_B=torch.ones(shape[0], dtype=torch.bool),
        n_tool_turns_B=tools,
    )  # fmt: skip
    tables = TurnTables({}, batch)
    return {credit.name: credit for credit in true_values(tables, groups, values)}


def test_lam_0_is_monte_carlo_credit_and_lam_1_the_return_less_the_value(groups, values, credits):
    half = part_of(values, slice(CONTINUATIONS // 2))
    assert credits[name_of(0)].advantage_N == pytest.approx(true_advantages(groups, half))
    wanted = [row.reward - half[digest(step.state.ids)].value for row in chain(*groups) for step in row.steps]
    assert credits[name_of(1)].advantage_N == pytest.approx(wanted)
    assert all(credit.held_out for credit in credits.values())


@pytest.mark.parametrize("lam", LAMS)
def test_a_turns_credit_is_its_own_change_and_lam_times_the_next_ones(groups, credits, lam):
    own, credit = (iter(credits[name_of(one)].advantage_N) for one in (0, lam))
    for row in chain(*groups):
        deltas, found_K = ([*islice(of, len(row.steps))] for of in (own, credit))
        after = [*found_K[1:], 0.0]
        assert found_K == pytest.approx([d + lam * a for d, a in zip(deltas, after, strict=True)])


def test_halved_credit_is_halved_below_0_alone(groups, values, credits):
    for lam in LAMS:
        whole, less = (credits[name].advantage_N for name in (name_of(lam), f"{name_of(lam)}, halved"))
        assert less == pytest.approx(np.where(whole < 0, whole / 2, whole))
    made = {credit.name: credit for credit in monte_carlo(groups, values, np.random.default_rng(0))}
    halved = credits[f"{name_of(0)}, halved"].advantage_N
    assert made["Monte Carlo, 6, halved"].advantage_N == pytest.approx(halved)


def agreements(value, low, high, n=40):
    nothing = Measure(None, n=n)
    of = {lam: Measure(value + lam, low + lam, high + lam, n) for lam in LAMS}
    return {name_of(lam): GradientAgreement(*[nothing] * 3, own_difference=one) for lam, one in of.items()}


@pytest.mark.parametrize(
    "measured, answer",
    [
        (
            (-0.4, -0.45, -0.35),
            "Yes, as far as its values are good: true values (by 16 continuations) win -0.40",
        ),
        ((-0.6, -0.65, -0.55), "No, true values point worse than GRPO: "),
        ((-0.5, -0.60, -0.40), "Not resolved by 40 questions (160 give +-.05 at lam 0.5): "),
    ],
)
def test_the_answer_is_that_of_the_lam_that_was_named_before(measured, answer):
    found = headroom(agreements(*measured), 16, 32)
    assert found["says"].startswith(f"Is turn credit worth it here? {answer}")
    assert found["says"].endswith("of own cosine over GRPO.") and "at lam 0.8" in found["says"]
    assert list(found["lam"]) == ["0", "0.5", "0.8", "1"]


def test_too_few_questions_or_continuations_and_no_gradients_are_no_answer():
    found = agreements(-0.6, -0.65, -0.55)
    assert "Not known, values are too noisy, take --continuations 32" in headroom(found, 16, 30)["says"]
    unknown = {name: GradientAgreement(*[one.bias] * 4) for name, one in found.items()}
    assert "Not known, own cosine needs at least 18 questions" in headroom(unknown, 16, 32)["says"]
    assert headroom({}, 16, 32) == {}
