"""A small Qwen3 in float64 as a policy: against the model itself, against finite differences, however rows are padded."""

from __future__ import annotations

import contextlib
import math
from dataclasses import replace

import pytest
import torch

import verl_credit.study.probe.policy as policy_module
from kit.tiny_models import VOCABULARY, in_float64, log_probs, tiny_model
from verl_credit.study.probe.kept_rollouts import Rollouts
from verl_credit.study.probe.policy import (
    ModelPolicy,
    Sampling,
    along,
    gradient,
    log_prob_and_entropy,
    moved,
    observe,
)

pytestmark = pytest.mark.slow

PROMPTS, RESPONSES = (3, 9, 5, 1), (6, 4, 2, 5)


def rollouts():
    """Row 0 holds an observation of two tokens between its turns; the policy wrote nothing of row 2."""
    generator = torch.Generator().manual_seed(0)
    ids = lambda n: torch.randint(3, VOCABULARY, (n,), generator=generator)  # noqa: E731
    written = torch.arange(6) < torch.tensor(RESPONSES)[:, None]
    written[0, 2:4] = False
    written[2] = False
    return Rollouts(
        [ids(n) for n in PROMPTS], [ids(n) for n in RESPONSES], written, torch.tensor([0, 1, 1, 2])
    )


@pytest.fixture(scope="module", params=["eager", "sdpa", "tied"])
def model(request):
    tied = request.param == "tied"
    attention = "eager" if tied else request.param
    return tiny_model("qwen3", attention=attention, dtype=torch.float64, tie_word_embeddings=tied)


@pytest.fixture
def policy(model):
    return ModelPolicy(model, rollouts(), Sampling(0.7))


@pytest.fixture(scope="module")
def direction(model):
    generator = torch.Generator().manual_seed(1)
    return {n: torch.randn(p.shape, generator=generator).double() for n, p in model.named_parameters()}


def test_log_probs_and_entropies_are_those_of_each_row_alone(model):
    found, rows = observe(ModelPolicy(model, rollouts(), Sampling()), 4, 4), rollouts()
    tied = model.config.tie_word_embeddings
    alone = in_float64(tiny_model("qwen3", attention="eager", dtype=torch.float64, tie_word_embeddings=tied))
    for row in range(4):
        prompt, written = rows.prompt_ids[row], rows.written_B_T[row]
        expected = log_probs(alone, torch.cat([prompt, rows.response_ids[row]]))[len(prompt) - 1 :]
        kept = written[: len(expected)]
        # the oracle's rotary tables are float32, the probe's are not
        torch.testing.assert_close(found.log_prob_B_T[row][written], expected[kept], rtol=0, atol=2e-6)
        assert not found.log_prob_B_T[row][~written].any() and not found.entropy_B_T[row][~written].any()
        assert (found.entropy_B_T[row][written] > 0.1).all()


@pytest.mark.parametrize("micro_batch", [1, 3])
def test_the_rows_beside_a_row_change_nothing(policy, direction, micro_batch):
    """Each row is padded to the longest of its micro-batch; one micro-batch holds the row without a written token alone."""
    for one, other in (
        (observe(policy, 4, micro_batch), observe(policy, 4, 4)),
        (along(policy, direction, 4, micro_batch), along(policy, direction, 4, 4)),
    ):
        torch.testing.assert_close(one.log_prob_B_T, other.log_prob_B_T, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(one.entropy_B_T, other.entropy_B_T, rtol=1e-12, atol=1e-12)
    weights = (
        torch.randn(2, 4, 6, generator=torch.Generator().manual_seed(2)).double() * rollouts().written_B_T
    )
    one, other = (gradient(policy, *weights, micro_batch=m) for m in (micro_batch, 4))
    for name in one:
        torch.testing.assert_close(one[name], other[name], rtol=1e-12, atol=1e-12)


def off_central_difference(policy, direction, h=1e-5):
    """The largest error of the derivative along the direction, relative to the largest derivative."""
    unit = {name: v / 100 for name, v in direction.items()}
    exact = along(policy, unit, 4, 4)
    up, down = (observe(policy, 4, 4, moved(policy.parameters, unit, step)) for step in (h, -h))
    errors = []
    for field in ("log_prob_B_T", "entropy_B_T"):
        derivative = getattr(exact, field)
        difference = (getattr(up, field) - getattr(down, field)) / (2 * h)
        errors.append(float((derivative - difference).abs().max() / derivative.abs().max()))
    return max(errors)


def test_derivatives_are_central_differences_only_where_the_model_stays_in_float64(
    policy, direction, monkeypatch
):
    assert off_central_difference(policy, direction) < 1e-7
    monkeypatch.setattr(policy_module, "KeepDouble", contextlib.nullcontext)
    assert off_central_difference(policy, direction) > 1e-6


def test_a_family_whose_norm_asks_for_float32_by_name():
    """Gemma's norm calls .float(), where Qwen's calls .to(torch.float32)."""
    model = tiny_model("gemma2", attention="eager", dtype=torch.float64)
    generator = torch.Generator().manual_seed(1)
    direction = {n: torch.randn(p.shape, generator=generator).double() for n, p in model.named_parameters()}
    assert off_central_difference(ModelPolicy(model, rollouts(), Sampling(0.7)), direction) < 1e-7


def test_a_nucleus_without_a_sampled_token_is_refused(model):
    with pytest.raises(ValueError, match="top_p=0.1 excludes .* expected the top_p"):
        observe(ModelPolicy(model, rollouts(), Sampling(top_p=0.1)), 4, 4)


def test_after_a_step_the_nucleus_is_still_that_of_the_rollouts(model, direction):
    """Tokens that leave the nucleus of the new parameters keep their log-prob; the sum of q over the old nucleus is 1."""
    sampling = Sampling(top_p=0.95)
    policy = ModelPolicy(model, greedy(model), sampling)
    after = moved(policy.parameters, direction, 0.2)
    new, old = policy._logits(after, [0, 1]), policy._logits(policy.parameters, [0, 1])
    found = observe(policy, 2, 2, after)
    with pytest.raises(ValueError, match="top_p=0.95 excludes"):
        log_prob_and_entropy(new[0], new[1], sampling)
    for i, (row, column) in enumerate(zip(*new[2], strict=True)):
        p, kept, mass = old[0][i].softmax(-1).tolist(), [], 0.0
        for token in sorted(range(VOCABULARY), key=lambda v: -p[v]):
            kept += [token] if mass < 0.95 else []
            mass += p[token]
        q = dict(zip(kept, new[0][i][kept].softmax(-1).tolist(), strict=True))
        assert float(found.log_prob_B_T[row, column]) == pytest.approx(math.log(q[int(new[1][i])]), abs=1e-12)
        entropy = -sum(v * math.log(v) for v in q.values())
        assert float(found.entropy_B_T[row, column]) == pytest.approx(entropy, abs=1e-12)


def greedy(model):
    """Two rows of four tokens, each the most probable one."""
    ids = torch.tensor([[5, 9], [7, 3]])
    for _ in range(4):
        ids = torch.cat([ids, model(input_ids=ids, use_cache=False).logits[:, -1:].argmax(-1)], 1)
    written = torch.ones(2, 4, dtype=torch.bool)
    return Rollouts(list(ids[:, :2]), list(ids[:, 2:]), written, torch.tensor([0, 1]))


def test_an_empty_prompt_is_refused():
    with pytest.raises(ValueError, match="row 1 has an empty prompt"):
        replace(rollouts(), prompt_ids=[torch.ones(n, dtype=torch.long) for n in (1, 0, 2, 2)])
