"""Forward mode, backward mode and the oracle's Jacobian are one derivative, however the rows are divided."""

from __future__ import annotations

import pytest
import torch

from kit.exact_policies import ARCHITECTURES, Bench, flat
from verl_credit.credit.entropy_gradient import Tokens, entropy_gradient
from verl_credit.study.probe.policy import Sampling, along, gradient, observe

ROWS = 10


@pytest.fixture(scope="module", params=ARCHITECTURES)
def bench(request):
    return Bench(ARCHITECTURES[request.param](Sampling(0.7, 0.9), seed=3))


@pytest.fixture(scope="module")
def drawn_B(bench):
    return bench.policy.draw(torch.Generator().manual_seed(0), ROWS, 1)[0]


@pytest.fixture(scope="module")
def direction(bench):
    generator = torch.Generator().manual_seed(1)
    return {n: torch.randn(p.shape, generator=generator).double() for n, p in bench.policy.parameters.items()}


def same(a, b, atol=1e-15):
    torch.testing.assert_close(a.log_prob_B_T, b.log_prob_B_T, rtol=1e-14, atol=atol)
    torch.testing.assert_close(a.entropy_B_T, b.entropy_B_T, rtol=1e-14, atol=atol)


def test_values_are_those_of_the_oracle(bench):
    same(observe(bench.policy, len(bench.policy.sequences), 7), bench.values)


def test_forward_mode_is_the_jacobian_in_the_direction(bench, drawn_B, direction):
    found = along(bench.policy.of(drawn_B), direction, ROWS, 4)
    same(found, bench.along(drawn_B, flat(direction)), atol=1e-13)


@pytest.mark.parametrize("micro_batch", [1, 3, 100])
def test_the_micro_batch_changes_nothing(bench, drawn_B, direction, micro_batch):
    policy = bench.policy.of(drawn_B)
    same(along(policy, direction, ROWS, micro_batch), along(policy, direction, ROWS, ROWS))
    weights = entropy_gradient(
        observe(policy, ROWS, micro_batch), policy.written_B_T, torch.arange(ROWS)
    ).combined()
    one, other = (gradient(policy, weights.score_B_T, weights.path_B_T, m) for m in (micro_batch, ROWS))
    torch.testing.assert_close(flat(one), flat(other), rtol=1e-13, atol=1e-15)


def test_rollouts_without_a_written_token_are_refused():
    nothing = torch.zeros(2, 3, dtype=torch.float64)
    with pytest.raises(ValueError, match="the policy wrote no token in any of the 2 rollouts"):
        entropy_gradient(Tokens(nothing, nothing), torch.zeros(2, 3, dtype=torch.bool), torch.arange(2))
