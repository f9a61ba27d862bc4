"""From sampled groups to the table: a policy of random weights on the choice world, and the rows that come out."""

from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest

from kit.choice_world import world
from kit.tiny_models import tiny_model
from verl_credit.study.fidelity.agreements import Measure
from verl_credit.study.fidelity.alignment import GradientAgreement
from verl_credit.study.fidelity.credits import Credit
from verl_credit.study.fidelity.gradients import GRPO, REFERENCE, RLOO, gradient_agreement, integrity
from verl_credit.study.fidelity.measure import sample_groups
from verl_credit.study.fidelity.request import Request
from verl_credit.study.fidelity.true_values import score_turns, states_of, values_of
from verl_credit.worlds.rollouts.rollout import Start, roll

PROMPTS, ROLLOUTS = 8, 4


def request(seed):
    return Request(out="", prompts=PROMPTS, rollouts=ROLLOUTS, continuations=8, seed=seed)


@pytest.fixture(scope="module")
def sampled():
    """(subject, groups, their turns, the replicate, its turns)."""
    sampler, protocol, prompts = world(PROMPTS)
    subject = SimpleNamespace(roll=partial(roll, sampler, protocol), prompts=prompts)
    groups = roll(sampler, protocol, [Start(state, ROLLOUTS, 0, "rollout") for state in prompts])
    replicate = sample_groups(subject, request(0), "replicate")
    values = values_of(
        states_of([*groups, *replicate]), partial(roll, sampler, protocol), continuations=8, seed=0
    )
    return (subject, groups, score_turns(groups, values), replicate, score_turns(replicate, values))


def leave_one_out(groups):
    """RLOO's advantages, the same at every turn."""
    found = []
    for group in groups:
        total = sum(path.reward for path in group)
        for path in group:
            found += [path.reward - (total - path.reward) / (ROLLOUTS - 1)] * len(path.steps)
    return np.array(found)


def test_a_replicate_is_other_rollouts_of_the_same_prompts(sampled):
    subject, groups, _, replicate, _ = sampled
    assert [group[0].steps[0].state for group in replicate] == subject.prompts
    assert groups == sample_groups(subject, request(0)) != replicate
    assert replicate == sample_groups(subject, request(0), "replicate")
    assert replicate != sample_groups(subject, request(1), "replicate")


@pytest.mark.slow
def test_a_row_per_credit_and_one_for_the_true_advantages(sampled):
    _, groups, turns, replicate, replicate_turns = sampled
    model = tiny_model("qwen3", "sdpa", num_hidden_layers=1)
    rloo = leave_one_out(groups)
    credits = [
        Credit(GRPO, 2 * rloo), Credit(RLOO, rloo), Credit("silent", 0 * rloo), Credit("turn_gae", None, "no values"),
    ]  # fmt: skip
    said = []
    found = gradient_agreement(
        model, groups, turns, credits, replicate, replicate_turns, batch_prompts=4, buckets=512,
        say=lambda done, of: said.append((done, of)),
    )  # fmt: skip
    assert list(found) == [GRPO, RLOO, "silent", REFERENCE]
    assert said[-1][0] == said[-1][1] == len(said) < sum(map(len, (turns, replicate_turns)))
    assert found[GRPO].own_difference == Measure(0.0, 0.0, 0.0, PROMPTS)
    for name in vars(found[GRPO]):  # credit may be twice as large
        one, other = (getattr(found[mode], name) for mode in (GRPO, RLOO))
        assert one.value == pytest.approx(other.value, abs=1e-9)
    assert found["silent"] == GradientAgreement(*[Measure(None, n=PROMPTS)] * 4)
    assert found[REFERENCE].bias.value == pytest.approx(1)
    assert found[REFERENCE].own.value is not None


def test_integrity_is_whether_rloos_interval_holds_1():
    def row(bias):
        return {RLOO: GradientAgreement(bias, *[Measure(None)] * 3)}

    for bias, passed in [
        (Measure(0.98, 0.95, 1.01, 64), True),
        (Measure(0.90, 0.85, 0.95, 64), False),
        (Measure(None, n=64), None),
    ]:
        assert integrity(row(bias)) == (bias, passed)
