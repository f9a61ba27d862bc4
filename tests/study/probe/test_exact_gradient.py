"""Both estimators against the exact gradient of policies whose every sequence can be listed.

Most tests sum over every possible batch of two or three rollouts: the expectation is exact. Those marked `drawn` repeat it
with groups that are too many to list; `make fuzz` runs them.
"""

from __future__ import annotations

import pytest
import torch

from kit.exact_policies import Bench, tabular
from verl_credit.study.probe.policy import Sampling
from verl_credit.study.probe.prediction import predict

SAMPLINGS = [Sampling(), Sampling(0.7), Sampling(1.0, 0.9), Sampling(0.7, 0.9)]
TWO_PROMPTS, BOTH = torch.tensor([0, 1]), torch.tensor([0, 0, 1])


def name(sampling):
    return f"T{sampling.temperature}-p{sampling.top_p}"


def small(sampling, longest=2):
    return Bench(tabular(sampling, seed=3, prompts=1, longest=longest))


def assert_unbiased(bench, group_B):
    torch.testing.assert_close(bench.expectation(group_B), bench.exact(), rtol=0, atol=1e-12)


@pytest.mark.parametrize("group_B", [TWO_PROMPTS, BOTH], ids=["pairs", "triples"])
def test_the_expectation_over_all_pairs_and_triples_of_rollouts_is_the_gradient(group_B):
    assert_unbiased(small(Sampling()), group_B)


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=name)
def test_and_under_every_sampling(sampling):
    assert_unbiased(small(sampling, longest=3), TWO_PROMPTS)


@pytest.mark.slow
def test_standard_errors_are_those_of_repeated_batches():
    """64 prompts, one rollout each. The ratio per token has a bias of O(1 / prompts): here below a tenth of its spread."""
    bench, groups = Bench(tabular(seed=3)), torch.arange(64)
    direction_D = torch.randn(90, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    exact = float(bench.exact() @ direction_D)
    found = []
    for drawn_B in bench.policy.draw(torch.Generator().manual_seed(5), 64, 1, 2000):
        one = predict(bench.weights(drawn_B, groups), bench.along(drawn_B, direction_D))
        found.append((one.slope, one.jackknife_se))
    slope, jackknife = torch.tensor(found, dtype=torch.float64).T
    empirical = float(slope.std())
    assert abs(float(slope.mean()) - exact) < 0.1 * empirical
    assert float(jackknife.square().mean().sqrt()) == pytest.approx(empirical, rel=0.05)
    covered = float(
        ((slope - exact).abs() < 1.998 * jackknife).double().mean()
    )  # t with 63 degrees of freedom
    assert covered == pytest.approx(0.95, abs=0.02)
