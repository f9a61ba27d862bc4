"""What each mode's expected gradient is, to rounding."""

import pytest
import torch

from verl_credit.study.fidelity.exact.bias import (
    advantages,
    as_world,
    compare,
    cosine,
    expected_gradients,
    in_groups,
    list_groups,
)
from verl_credit.study.fidelity.exact.operators import (  # fmt: skip
    gradient,
    log_success,
    outcome_credit_of,
    reward,
    turn_credit_of,
    with_gain,
)
from verl_credit.study.fidelity.exact.question import ONE_HOP, TWO_HOPS, list_trajectories

TIGHT = {"rtol": 0, "atol": 1e-9}
SIZES = [2, 3, 5]
QUESTIONS = pytest.mark.parametrize("question", [ONE_HOP, TWO_HOPS], ids=lambda q: q.name)


def of(credit, question, size, stop=0.3):
    return expected_gradients(credit, list_trajectories(question), size, [stop])[0]


def true(objective, question, size=8, stop=0.3):
    trajectories = list_trajectories(question)
    return gradient(objective, trajectories, trajectories.choices.logits_with_stop(stop), size)


@QUESTIONS
@pytest.mark.parametrize("size", [*SIZES, pytest.param(8, marks=pytest.mark.slow)])
@pytest.mark.parametrize("stop", [0.1, 0.6])
def test_rloo_and_low_baseline_are_unbiased_and_grpo_without_std_is_shrunk(question, size, stop):
    exact_D = true(reward, question, stop=stop)
    for operator in ("rloo", "low_baseline"):
        torch.testing.assert_close(of(outcome_credit_of(operator), question, size, stop), exact_D, **TIGHT)
    weighed_D = of(outcome_credit_of("half_negative"), question, size, stop)
    assert compare(weighed_D, exact_D)["cosine"] == pytest.approx(1, abs=1e-9)
    centred_D = of(outcome_credit_of("grpo", norm_by_std=False), question, size, stop)
    torch.testing.assert_close(centred_D, (size - 1) / size * exact_D, **TIGHT)
    found = compare(centred_D, exact_D)
    assert found["cosine"] == pytest.approx(1, abs=1e-9)
    assert found["norm_ratio"] == pytest.approx((size - 1) / size, abs=1e-9)
    assert found["scale"] == pytest.approx((size - 1) / size, abs=1e-9)
    assert found["difference"] == pytest.approx(0, abs=1e-9)


def test_below_gamma_1_it_is_the_discounted_return_to_go_and_no_objectives_gradient():
    """E[sum over k of grad log pi_k sum over j >= k of gamma^(j-k) gain_j]: the discount starts anew at every turn."""
    trajectories = list_trajectories(TWO_HOPS)
    logits_D = trajectories.choices.logits_with_stop(0.3)
    gain_N_K, gamma = trajectories.gain_N_K, 0.5
    togo_N_K1 = torch.zeros(trajectories.choice_N_K1.shape, dtype=torch.float64)
    for k in range(gain_N_K.shape[1]):
        for j in range(k, gain_N_K.shape[1]):
            togo_N_K1[:, k] += gamma ** (j - k) * gain_N_K[:, j]
    weight_N_K1 = trajectories.probability_N(logits_D)[:, None] * (
        trajectories.outcome_N[:, None] + togo_N_K1
    )
    field_D = torch.einsum("nk,nkd->d", weight_N_K1, trajectories.score_N_K1_D(logits_D))
    found_D = of(turn_credit_of("turn-group-unbiased", alpha=1.0, gamma=gamma), TWO_HOPS, 3)
    torch.testing.assert_close(found_D, field_D, **TIGHT)
    for objective in (with_gain(1.0), with_gain(1.0, gamma)):
        assert cosine(found_D, true(objective, TWO_HOPS)) < 0.9999


@QUESTIONS
@pytest.mark.parametrize("size", SIZES)
def test_maxrl_follows_the_logarithm_of_success_cut_after_n_minus_1_terms(question, size):
    """But for its eps of 1e-6 in the denominator."""
    found_D, own_D = of(outcome_credit_of("maxrl"), question, size), true(log_success, question, size)
    assert float((found_D - own_D).norm() / own_D.norm()) < 1e-5


@pytest.mark.slow
@QUESTIONS
def test_an_outcome_operator_turns_no_single_question(question):
    """With 0/1 outcomes E[A | trajectory] depends on the outcome alone: a question's gradient is only made longer."""
    for operator in ("grpo", "maxrl", "reinforce_pp"):
        assert cosine(of(outcome_credit_of(operator), question, 3), true(reward, question)) == pytest.approx(
            1
        )


def test_the_difference_is_the_smallest_over_all_scales():
    expected_D, true_D = torch.tensor([3.0, 1.0]).double(), torch.tensor([1.0, 1.0]).double()
    found = compare(expected_D, true_D)
    scale_S = torch.linspace(0, 1, 100_001).double()
    smallest = float((expected_D * scale_S[:, None] - true_D).norm(dim=1).min())
    assert found["difference"] == pytest.approx(smallest, abs=1e-8)
    assert found["scale"] == pytest.approx(10 / 4)
    right_angle = compare(torch.tensor([1.0, -1.0]).double(), true_D)
    assert (right_angle["cosine"], right_angle["scale"]) == (0.0, None)


@pytest.mark.slow
def test_batch_scope_gets_one_group_a_call():
    trajectories = list_trajectories(ONE_HOP)
    world = as_world(trajectories, trajectories.choices.logits_with_stop(0.3))
    group_M_G = list_groups(len(trajectories.outcome_N), 3)[-30:-18]  # of rows with searches
    for credit in (turn_credit_of("turn-group"), outcome_credit_of("reinforce_pp")):
        together = advantages(credit, world, group_M_G)
        alone = [credit.run(in_groups(world, group_m_G)).advantage_B_T for group_m_G in group_M_G.split(1)]
        assert torch.equal(together, torch.stack(alone))
        in_one_batch = credit.run(in_groups(world, group_M_G)).advantage_B_T.view_as(together)
        assert not torch.allclose(together, in_one_batch)
