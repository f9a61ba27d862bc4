"""Both estimators against the exact gradient of policies whose every sequence can be listed.

Most tests sum over every possible batch of two or three rollouts: the expectation is exact. Those marked `drawn` repeat it
with groups that are too many to list; `make fuzz` runs them.
"""

from __future__ import annotations

import pytest
import torch

from kit.exact_policies import ARCHITECTURES, Bench, estimator, tabular, two_layers
from verl_credit.study.probe.file import ESTIMANDS, EstimatorSettings
from verl_credit.study.probe.policy import Sampling
from verl_credit.study.probe.prediction import predict

SAMPLINGS = [Sampling(), Sampling(0.7), Sampling(1.0, 0.9), Sampling(0.7, 0.9)]
BASELINES = ["none", "constant", "residual_mu"]
ESTIMATORS = [estimator("naive", "per_sequence"), estimator("naive", "per_token")] + [
    estimator("rb_residual", estimand, baseline) for estimand in ESTIMANDS for baseline in BASELINES
]
TWO_PROMPTS, SIBLINGS, BOTH = torch.tensor([0, 1]), torch.tensor([0, 0]), torch.tensor([0, 0, 1])


def name(value):
    if isinstance(value, Sampling):
        return f"T{value.temperature}-p{value.top_p}"
    if isinstance(value, EstimatorSettings):
        extra = [value.baseline] if value.x_estimator_mode != "naive" else []
        return "-".join([value.x_estimator_mode, value.estimand, *extra])


def z_scores(estimate_R_D, exact_D):
    """Along the gradient and eight random directions; single parameters of states seen once or twice have no z."""
    directions_D_9 = torch.randn(
        len(exact_D), 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64
    )
    directions_D_9 = torch.cat([exact_D[:, None], directions_D_9], 1)
    off_R_9 = (estimate_R_D - exact_D) @ directions_D_9
    return off_R_9.mean(0) / (off_R_9.std(0) / len(off_R_9) ** 0.5)


def small(sampling, longest=2):
    return Bench(tabular(sampling, seed=3, prompts=1, longest=longest))


def assert_unbiased(bench, group_B, settings):
    torch.testing.assert_close(
        bench.expectation(group_B, settings), bench.exact(settings.estimand), rtol=0, atol=1e-12
    )


@pytest.mark.slow
@pytest.mark.parametrize("settings", ESTIMATORS, ids=name)
def test_the_expectation_over_all_pairs_and_triples_of_rollouts_is_the_gradient(settings):
    bench = small(Sampling())
    assert_unbiased(bench, TWO_PROMPTS, settings)
    assert_unbiased(bench, BOTH, settings)
    if settings.x_estimator_mode == "naive":
        assert_unbiased(bench, SIBLINGS, settings)


@pytest.mark.parametrize("settings", [s for s in ESTIMATORS if s.estimand == "per_token"], ids=name)
def test_and_under_a_nucleus_and_a_temperature(settings):
    assert_unbiased(small(Sampling(0.7, 0.9)), TWO_PROMPTS, settings)


@pytest.mark.slow
@pytest.mark.parametrize("sampling", SAMPLINGS, ids=name)
def test_and_under_every_sampling(sampling):
    bench = small(sampling, longest=3)
    for settings in ESTIMATORS:
        assert_unbiased(bench, TWO_PROMPTS, settings)


@pytest.mark.drawn
@pytest.mark.parametrize("number", range(len(ESTIMATORS)), ids=lambda i: name(ESTIMATORS[i]))
def test_two_thousand_batches_do_not_differ_from_the_gradient(number):
    """Four groups of two rollouts, groups drawn from two prompts; architectures and samplings in turn."""
    settings, sampling = ESTIMATORS[number], SAMPLINGS[number // 2 % 4]
    bench = Bench((tabular, two_layers)[number % 2](sampling, seed=3))
    drawn_R_B = bench.policy.draw(torch.Generator().manual_seed(number), 4, 2, 2000)
    estimate_R_D = bench.gradients(drawn_R_B, torch.arange(4).repeat_interleave(2), settings)
    z_9 = z_scores(estimate_R_D, bench.exact(settings.estimand))
    assert z_9.abs().max() < 4, sampling


def test_there_is_no_naive_estimate_of_the_mean_over_a_rollout():
    """E[-S / T] differs from E[Σ H / T], while E[-S] = E[Σ H]."""
    policy = tabular(seed=3)
    q_S, surprise_S = policy.probability_S() / policy.prompts, -policy.values().log_prob_B_T.sum(1)
    assert float(q_S @ surprise_S) == pytest.approx(float(policy.entropy("per_sequence")), abs=1e-12)
    off = float(q_S @ (surprise_S / policy.length_S)) - float(policy.entropy("per_sequence_mean"))
    assert abs(off) > 0.005
    with pytest.raises(ValueError, match="naive with estimand=per_sequence_mean: -S / T estimates another"):
        estimator("naive", "per_sequence_mean")


def variance(bench, settings, seed):
    drawn_R_B = bench.policy.draw(torch.Generator().manual_seed(seed), 8, 2, 400)
    return float(bench.gradients(drawn_R_B, torch.arange(8).repeat_interleave(2), settings).var(0).sum())


@pytest.mark.drawn
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("estimand", ["per_sequence", "per_token"])
def test_the_variance_is_at_most_half_of_the_naive_one(architecture, estimand):
    for seed in range(10):
        bench = Bench(ARCHITECTURES[architecture](seed=seed))
        naive = variance(bench, estimator("naive", estimand), seed)
        rb = variance(bench, estimator("rb_residual", estimand), seed)
        assert rb < 0.5 * naive, seed


EMPIRICAL = [
    estimator("naive", "per_sequence"),
    estimator("rb_residual", "per_sequence", "none"),
    estimator("rb_residual", "per_sequence_mean"),
    estimator("rb_residual", "per_token"),
]


@pytest.mark.slow
@pytest.mark.parametrize("settings", EMPIRICAL, ids=name)
def test_standard_errors_are_those_of_repeated_batches(settings):
    """64 prompts, one rollout each. The ratio per token has a bias of O(1 / prompts): here below a tenth of its spread."""
    bench, groups = Bench(tabular(seed=3)), torch.arange(64)
    direction_D = torch.randn(90, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    exact = float(bench.exact(settings.estimand) @ direction_D)
    found = []
    for drawn_B in bench.policy.draw(torch.Generator().manual_seed(5), 64, 1, 2000):
        one = predict(bench.weights(drawn_B, groups, settings), bench.along(drawn_B, direction_D))
        found.append((one.slope, one.conditional_se, one.jackknife_se))
    slope, conditional, jackknife = torch.tensor(found, dtype=torch.float64).T
    empirical = float(slope.std())
    assert abs(float(slope.mean()) - exact) < 0.1 * empirical
    for se in (conditional, jackknife):
        assert float(se.square().mean().sqrt()) == pytest.approx(empirical, rel=0.05)
    covered = float(
        ((slope - exact).abs() < 1.998 * jackknife).double().mean()
    )  # t with 63 degrees of freedom
    assert covered == pytest.approx(0.95, abs=0.02)
