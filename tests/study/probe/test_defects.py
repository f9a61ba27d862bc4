"""The numerical defects of the founding plan and its code, put back one at a time: each is seen.

``off`` is the distance of the estimate's expectation, over every possible batch, from the exact gradient.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch

import kit.exact_policies
import verl_credit.study.probe.entropy_gradient as baselines
from kit.exact_policies import Bench, estimator, tabular
from verl_credit.study.probe.change import predict, u_statistic
from verl_credit.study.probe.entropy_gradient import Surrogate, Targets, entropy_gradient
from verl_credit.study.probe.policy import Sampling, gradient, log_prob_and_entropy
from verl_credit.study.probe.settings import ESTIMANDS, BaselineSettings, ProbeSettings

TWO_PROMPTS = torch.tensor([0, 1])
SEEN = 0.02
"""A relative error of the gradient that a defect exceeds; the right code has 1e-12."""


@pytest.fixture(scope="module")
def bench():
    return Bench(tabular(seed=3, prompts=1, longest=3))


def off(bench, settings, make=entropy_gradient, estimand=None):
    exact_D = bench.exact(estimand or settings.estimand)
    return float((bench.expectation(TWO_PROMPTS, settings, make) - exact_D).norm() / exact_D.norm())


def rb(baseline="residual_mu", fit="leave_one_out", estimand="per_sequence"):
    return estimator("rb_residual", estimand, baseline, fit)


def running_mean(*lengths):
    """The EMA's prediction for the last row; each row is a prompt with residuals 1, 2, 4 at its places."""
    written = torch.arange(3) < torch.tensor(lengths)[:, None]
    residual = torch.arange(1, len(lengths) + 1)[:, None] * torch.tensor([1.0, 2.0, 4.0], dtype=torch.float64)
    targets = Targets(residual * written, written, torch.arange(len(lengths)))
    return baselines.baseline(targets, BaselineSettings(fit="previous", ema_decay=0.9))[-1].tolist()


def test_e1_the_decay_is_the_weight_of_the_old_mean(monkeypatch):
    right = [0.9 * 1 + 0.1 * 2, 0.9 * 2 + 0.1 * 4, 0.9 * 4 + 0.1 * 8]
    assert running_mean(3, 3, 3) == pytest.approx(right)
    real = baselines._previous
    monkeypatch.setattr(baselines, "_previous", lambda targets, place, decay: real(targets, place, 1 - decay))
    assert running_mean(3, 3, 3) == pytest.approx([1.9, 3.8, 7.6])


def test_e1_e2_the_numbers_of_the_released_rule():
    """Residuals (.75, .25, 0) and (.2, 0): the mean (.475, .125, 0) is taken over nine tenths and subtracted at once."""
    residual = torch.tensor([[0.75, 0.25, 0], [0.2, 0, 0]], dtype=torch.float64)
    written = torch.tensor([[True, True, True], [True, True, False]])
    released = residual - 0.9 * (residual.sum(0) / written.sum(0))
    torch.testing.assert_close(released[0], torch.tensor([0.3225, 0.1375, 0], dtype=torch.float64))
    assert released[1, :2].tolist() == pytest.approx([-0.2275, -0.1125])
    for fit, first, second in (
        ("previous", [0.75, 0.25, 0], [-0.55, -0.25]),  # nothing before row 0; row 0 before row 1
        ("leave_one_out", [0.55, 0.25, 0], [-0.55, -0.25]),
    ):
        targets = Targets(residual, written, torch.tensor([0, 1]))
        left = residual - baselines.baseline(targets, BaselineSettings(fit=fit))
        assert left[0].tolist() == pytest.approx(first)
        assert left[1, :2].tolist() == pytest.approx(second)


def own_sample_included(targets, place_B_T):
    summed_P_J, counted_P_J = baselines._sums(targets, place_B_T)
    return (summed_P_J.sum(0) / counted_P_J.sum(0).clamp_min(1))[place_B_T]


@pytest.mark.parametrize("mode", ["constant", "residual_mu"])
def test_e2_a_mean_that_holds_the_sample_it_is_subtracted_from(bench, mode, monkeypatch):
    assert off(bench, rb(mode)) < 1e-12
    monkeypatch.setattr(baselines, "_leave_one_out", own_sample_included)
    assert off(bench, rb(mode)) > SEEN


def test_e2_a_mean_that_is_updated_before_it_is_used(bench, monkeypatch):
    """The released order: the prompt's own mean enters the EMA first."""
    assert off(bench, rb(fit="previous")) < 1e-12
    real = baselines._previous

    def after_update(targets, place_B_T, decay):
        """The prediction for the prompt after, had it the same rows."""
        again = Targets(
            torch.cat([targets.residual_B_T[:1]] * 2 + [targets.residual_B_T[1:]] * 2),
            torch.cat([targets.written_B_T[:1]] * 2 + [targets.written_B_T[1:]] * 2),
            torch.tensor([0, 1, 2, 3]),
        )
        return real(again, torch.cat([place_B_T[:1]] * 2 + [place_B_T[1:]] * 2), decay)[[1, 3]]

    monkeypatch.setattr(baselines, "_previous", after_update)
    assert off(bench, rb(fit="previous")) > SEEN


def test_e2_a_regression_fitted_to_what_it_predicts(bench, monkeypatch):
    assert off(bench, rb("regression")) < 1e-12
    real = baselines._regression

    def in_sample(targets, settings):
        """Every row twice: the fit to one copy predicts the other."""
        rows = len(targets.prompt_B)
        twice = Targets(
            targets.residual_B_T.repeat(2, 1),
            targets.written_B_T.repeat(2, 1),
            torch.tensor([0, 1]).repeat_interleave(rows),
            targets.features_B_T_F.repeat(2, 1, 1),
        )
        return real(twice, settings.model_copy(update={"folds": 2}))[:rows]

    monkeypatch.setattr(baselines, "_regression", in_sample)
    assert off(bench, rb("regression")) > SEEN


def test_e3_a_place_that_no_row_reaches_keeps_its_mean(monkeypatch):
    right = [0.9 * 1.1 + 0.1 * 3, 0.9 * 2 + 0.1 * 4, 4]
    assert running_mean(3, 2, 1, 3) == pytest.approx(right)
    real = baselines._sums
    monkeypatch.setattr(
        baselines, "_sums", lambda *a: (real(*a)[0], real(*a)[1].clamp_min(1))
    )  # the mean of nothing is 0
    assert running_mean(3, 2, 1, 3) == pytest.approx([right[0], 0.9 * right[1], 0.81 * 4])


@pytest.mark.parametrize("mode", ["naive", "rb_residual"])
def test_e4_a_pad_to_the_left_cuts_no_token_from_the_response(bench, mode):
    """Released: length = attention_mask.sum() - padded prompt length, so each pad takes a token from the end."""
    settings = estimator(mode, "per_sequence")
    assert off(bench, settings) < 1e-12

    def one_pad(seen, written_B_T, *rest):
        kept_B = (written_B_T.sum(1) - 1).clamp_min(1)
        return entropy_gradient(seen, torch.arange(written_B_T.shape[1]) < kept_B[:, None], *rest)

    assert off(bench, settings, one_pad) > SEEN


def test_e5_the_micro_batch_does_not_scale_the_gradient(bench):
    weights = torch.randn(
        2, *bench.policy.written_S_T.shape, generator=torch.Generator().manual_seed(0)
    ).double()
    score_S_T, path_S_T = weights * bench.policy.written_S_T

    def right(micro_batch):
        return gradient(bench.policy, score_S_T, path_S_T, micro_batch)["logits"]

    def released(micro_batch):
        """Each micro-batch's sum is multiplied by its number of prompts."""
        rows = list(range(len(score_S_T)))
        parts = [rows[i : i + micro_batch] for i in range(0, len(rows), micro_batch)]
        return sum(len(p) * gradient(bench.policy, score_S_T, path_S_T, len(p), p)["logits"] for p in parts)

    for micro_batch in (2, 4, 15):
        torch.testing.assert_close(right(micro_batch), right(1), rtol=1e-14, atol=1e-15)
        assert released(micro_batch).norm() > 1.5 * released(1).norm()


def test_e6_the_return_to_go_over_the_own_length_is_the_gradient_of_no_estimand(bench):
    def own_length(seen, written_B_T, *rest):
        found = entropy_gradient(seen, written_B_T, *rest)
        length_B_1 = written_B_T.sum(1, keepdim=True)
        n = found.numerator
        return replace(found, numerator=Surrogate(n.score_B_T / length_B_1, n.path_B_T / length_B_1))

    for estimand in ESTIMANDS:
        assert off(bench, rb(), own_length, estimand) > SEEN


@pytest.mark.parametrize("sampling", [Sampling(0.7), Sampling(0.7, 0.9)])
def test_e7_entropy_and_score_belong_to_one_distribution(sampling, monkeypatch):
    bench = Bench(tabular(sampling, seed=3, prompts=1, longest=3))
    assert off(bench, rb()) < 1e-12

    def mixed(logits_N_V, token_N, sampling, sampled_N_V):
        entropy_N = log_prob_and_entropy(logits_N_V, token_N, sampling, sampled_N_V)[1]
        return log_prob_and_entropy(logits_N_V, token_N, Sampling())[0], entropy_N

    monkeypatch.setattr(kit.exact_policies, "log_prob_and_entropy", mixed)
    assert off(bench, rb()) > SEEN


@pytest.mark.slow
def test_e8_the_standard_error_is_that_of_the_estimator_in_use():
    bench, groups = Bench(tabular(seed=3)), torch.arange(16)
    direction_D = torch.randn(90, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    found = []
    for drawn_B in bench.policy.draw(torch.Generator().manual_seed(2), 16, 1, 400):
        derivative = bench.along(drawn_B, direction_D)
        own, naive = (
            predict(bench.weights(drawn_B, groups, s), derivative)
            for s in (rb(estimand="per_token"), estimator("naive", "per_token"))
        )
        found.append((own.slope, own.jackknife_se, naive.jackknife_se))
    slope, own, released = torch.tensor(found, dtype=torch.float64).T
    empirical = float(slope.std())
    assert float(own.square().mean().sqrt()) == pytest.approx(empirical, rel=0.1)
    assert float(released.square().mean().sqrt()) > 2 * empirical


def test_e9_without_the_pathwise_term_the_estimate_is_biased_and_says_so(bench):
    assert off(bench, rb()) < 1e-12
    assert off(bench, rb(), partial(entropy_gradient, pathwise=False)) > 0.1
    without = ProbeSettings(generation={"rb_requires_grad": False})
    assert "biased" not in ProbeSettings().banner()
    assert "WITHOUT the pathwise term: X is biased" in without.banner()


def test_e11_the_plug_in_standard_error_of_the_u_statistic():
    """64 prompts with X · Y of scalars that share a mean; the released ζ₁ is P / 4 times too large."""
    generator = torch.Generator().manual_seed(4)
    x_R_P, y_R_P = 1 + torch.randn(2, 500, 64, generator=generator, dtype=torch.float64)
    found = [u_statistic(x * y.mean(), x.mean() * y, x * y) for x, y in zip(x_R_P, y_R_P, strict=True)]
    empirical = float(torch.tensor([u.value for u in found]).std())
    for se in ("plug_in_se", "jackknife_se"):
        mean_square = torch.tensor([getattr(u, se) for u in found]).square().mean()
        assert float(mean_square.sqrt()) == pytest.approx(empirical, rel=0.1)
        assert float(mean_square.sqrt()) * (64 / 4) ** 0.5 > 3.5 * empirical


def test_a_position_in_units_of_the_own_length_looks_ahead(bench):
    """The regression may know the place, not how far the end is: that depends on the tokens to come."""
    assert off(bench, rb("regression")) < 1e-12

    def relative(seen, written_B_T, group_B, settings, features_B_T_F):
        place_B_T = torch.arange(written_B_T.shape[1]) / written_B_T.sum(1, keepdim=True)
        return entropy_gradient(
            seen,
            written_B_T,
            group_B,
            settings,
            torch.cat([features_B_T_F[..., :6], place_B_T[..., None]], -1),
        )

    assert off(bench, rb("regression"), relative) > 0.005  # with two rollouts;
