"""The numerical defects of the founding plan and its code, put back one at a time: each is seen.

``off`` is the distance of the estimate's expectation, over every possible batch, from the exact gradient.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import kit.exact_policies
import verl_credit.credit.entropy_gradient as estimators
from kit.exact_policies import Bench, tabular
from verl_credit.credit.entropy_gradient import Surrogate, entropy_gradient
from verl_credit.study.probe.policy import Sampling, gradient, log_prob_and_entropy

TWO_PROMPTS = torch.tensor([0, 1])
SEEN = 0.02
"""A relative error of the gradient that a defect exceeds; the right code has 1e-12."""


@pytest.fixture(scope="module")
def bench():
    return Bench(tabular(seed=3, prompts=1, longest=3))


def off(bench, make=entropy_gradient):
    exact_D = bench.exact()
    return float((bench.expectation(TWO_PROMPTS, make) - exact_D).norm() / exact_D.norm())


@pytest.mark.slow
def test_e2_a_mean_that_holds_the_sample_it_is_subtracted_from(bench, monkeypatch):
    assert off(bench) < 1e-12

    def own_sample_included(residual_B_T, written_B_T, prompt_B):
        place_B_T = estimators.places(written_B_T)
        mean_J = torch.zeros(written_B_T.shape[1], dtype=torch.float64)
        for place in range(written_B_T.shape[1]):
            at_B_T = written_B_T & (place_B_T == place)
            mean_J[place] = residual_B_T[at_B_T].mean() if at_B_T.any() else 0.0
        return torch.where(written_B_T, mean_J[place_B_T], 0.0)

    monkeypatch.setattr(estimators, "predicted", own_sample_included)
    assert off(bench) > SEEN


@pytest.mark.slow
def test_e4_a_pad_to_the_left_cuts_no_token_from_the_response(bench):
    """Released: length = attention_mask.sum() - padded prompt length, so each pad takes a token from the end."""
    assert off(bench) < 1e-12

    def one_pad(seen, written_B_T, *rest):
        kept_B = (written_B_T.sum(1) - 1).clamp_min(1)
        return entropy_gradient(seen, torch.arange(written_B_T.shape[1]) < kept_B[:, None], *rest)

    assert off(bench, one_pad) > SEEN


def test_e5_the_micro_batch_does_not_scale_the_gradient(bench):
    weights = torch.randn(
        2, *bench.policy.written_S_T.shape, generator=torch.Generator().manual_seed(0)
    ).double()
    score_S_T, path_S_T = weights * bench.policy.written_S_T

    def right(micro_batch):
        return gradient(bench.policy, score_S_T, path_S_T, micro_batch)["logits"]

    def released(micro_batch):
        """Each micro-batch's sum is multiplied by its number of prompts."""
        part_S = torch.arange(len(score_S_T)) // micro_batch
        prompts_S_1 = torch.bincount(part_S)[part_S][:, None]
        return gradient(bench.policy, prompts_S_1 * score_S_T, prompts_S_1 * path_S_T, micro_batch)["logits"]

    for micro_batch in (2, 4, 15):
        torch.testing.assert_close(right(micro_batch), right(1), rtol=1e-14, atol=1e-15)
        assert released(micro_batch).norm() > 1.5 * released(1).norm()


@pytest.mark.slow
def test_e6_the_return_to_go_over_the_own_length_is_another_gradient(bench):
    def own_length(seen, written_B_T, *rest):
        found = entropy_gradient(seen, written_B_T, *rest)
        length_B_1 = written_B_T.sum(1, keepdim=True)
        n = found.numerator
        return replace(found, numerator=Surrogate(n.score_B_T / length_B_1, n.path_B_T / length_B_1))

    assert off(bench, own_length) > SEEN


@pytest.mark.slow
@pytest.mark.parametrize("sampling", [Sampling(0.7), Sampling(0.7, 0.9)])
def test_e7_entropy_and_score_belong_to_one_distribution(sampling, monkeypatch):
    bench = Bench(tabular(sampling, seed=3, prompts=1, longest=3))
    assert off(bench) < 1e-12

    def mixed(logits_N_V, token_N, sampling, sampled_N_V):
        entropy_N = log_prob_and_entropy(logits_N_V, token_N, sampling, sampled_N_V)[1]
        return log_prob_and_entropy(logits_N_V, token_N, Sampling())[0], entropy_N

    monkeypatch.setattr(kit.exact_policies, "log_prob_and_entropy", mixed)
    assert off(bench) > SEEN


@pytest.mark.slow
def test_e9_without_the_pathwise_term_the_estimate_is_biased(bench):
    def no_path(*given):
        found = entropy_gradient(*given)
        return replace(found, numerator=replace(found.numerator, path_B_T=0 * found.numerator.path_B_T))

    assert off(bench) < 1e-12
    assert off(bench, no_path) > 0.1
