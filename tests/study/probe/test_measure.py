"""A whole probe on a small transformers model in float64: its parts agree with each other."""

import math
from dataclasses import replace

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from kit.live_optimizer import optimizer_state
from verl_credit.config.keys.section import declared
from verl_credit.study.probe.file import ProbeSettings
from verl_credit.study.probe.kept_rollouts import Rollouts
from verl_credit.study.probe.measure import Probe
from verl_credit.study.probe.policy import ModelPolicy, Sampling, observe

VOCABULARY, TOKENS, PROMPTS, ROLLOUTS = 12, 7, 4, 3


@pytest.fixture(scope="module")
def model():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = Qwen3Config(
            vocab_size=VOCABULARY, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
            head_dim=4, intermediate_size=8, tie_word_embeddings=True, initializer_range=0.5, attn_implementation="eager",
        )  # fmt: skip
        return Qwen3ForCausalLM(config).double().eval()


@pytest.fixture(scope="module")
def optimizer(model):
    """After one step, so that there are moments; the step is small."""
    made = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)
    generator = torch.Generator().manual_seed(1)
    for p in model.parameters():
        p.grad = torch.randn(p.shape, generator=generator, dtype=p.dtype)
    made.step()
    made.zero_grad()
    return optimizer_state(made, model.named_parameters())


def rollouts(first: int, seed: int) -> Rollouts:
    generator = torch.Generator().manual_seed(seed)
    rows = PROMPTS * ROLLOUTS
    lengths = torch.randint(3, TOKENS + 1, (rows,), generator=generator).tolist()
    lengths[0] = TOKENS
    written_B_T = torch.arange(TOKENS)[None, :] < torch.tensor(lengths)[:, None]
    written_B_T[:, 1] = False  # an observation
    prompts = [torch.randint(VOCABULARY, (4,), generator=generator) for _ in range(PROMPTS)]
    return Rollouts(
        prompt_ids=[prompts[row // ROLLOUTS] for row in range(rows)],
        response_ids=[torch.randint(VOCABULARY, (n,), generator=generator) for n in lengths],
        written_B_T=written_B_T,
        group_B=first + torch.arange(rows) // ROLLOUTS,
        advantage_B_T=torch.randn(rows, 1, generator=generator, dtype=torch.float64).expand(rows, TOKENS)
        * written_B_T,
    )


E, U = rollouts(0, 2), rollouts(100, 3)


def probe(model, optimizer, e=E, u=U, sampling=None, **tree) -> Probe:
    tree = {"runtime": {"micro_batch": 5}, "truth": {"etas": [0.5, 1.0]}, **tree}
    settings = declared(ProbeSettings, tree, "probe.yaml")
    objective = {"loss_agg_mode": "token-mean", "loss_scale_factor": None, "grad_clip": 1.0}
    return Probe(model, e, u, sampling or Sampling(), optimizer, objective, TOKENS, settings)


@pytest.mark.slow
def test_the_two_ways_to_the_prediction_agree_and_the_derivatives_are_right(model, optimizer):
    found = probe(model, optimizer).measure()
    d = found["delta_h1"]
    assert d["by_dot_product"] == pytest.approx(d["value"], rel=1e-9)
    assert found["derivative_check"] < 1e-5
    assert d["interval_95"][0] < d["value"] < d["interval_95"][1]


@pytest.mark.slow
def test_the_change_is_measured_at_each_rate_and_is_linear_for_small_ones(model, optimizer):
    found = probe(model, optimizer, truth={"etas": [1e-3, 1e-2]}).measure()
    assert [row["eta"] for row in found["truth"]] == pytest.approx([1e-6, 1e-5])
    assert found["log_log_slope"] == pytest.approx(1, abs=1e-3)
    assert all(row["clipped"] == 0 and row["ess"] > 11.9 for row in found["truth"])


@pytest.mark.slow
def test_the_update_knows_no_nucleus(model, optimizer):
    """Training divides logits by the temperature and cuts nothing; a nucleus that cuts tokens of U changes no gradient."""
    full, cut = (
        probe(model, optimizer, sampling=Sampling(1.3, top_p)).measure()["norms"]
        for top_p in (1.0, 1 - 1e-12)
    )
    assert cut["y_gradient"] == full["y_gradient"]
    policy = ModelPolicy(model, U, Sampling(1.3, 0.2))
    with pytest.raises(ValueError, match="top_p=0.2 excludes"):
        observe(policy, len(U), 5)
    assert probe(model, optimizer, sampling=Sampling(1.3, 0.2))._direction(
        ModelPolicy(model, U, Sampling(1.3))
    )


def test_shared_prompts_are_refused(model, optimizer):
    with pytest.raises(ValueError, match="E and U share 4 prompts, for example prompt 0"):
        probe(model, optimizer, u=E)


def test_an_update_without_advantages_is_refused(model, optimizer):
    for advantage, said in (
        (torch.zeros(len(U), TOKENS), "every advantage in U is 0"),
        (None, "without advantages"),
    ):
        with pytest.raises(ValueError, match=said):
            probe(model, optimizer, u=replace(U, advantage_B_T=advantage)).measure()


def test_one_prompt_has_a_prediction_and_no_error(model, optimizer):
    found = probe(model, optimizer, e=E.of_prompts([0])).measure()
    assert math.isfinite(found["delta_h1"]["value"]) and math.isnan(found["delta_h1"]["se"])
