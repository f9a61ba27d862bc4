"""verl's engine around Qwen3-Next and Qwen3.5 in float64, packed: values and gradients are transformers', row by row."""

from contextlib import contextmanager
from unittest import mock

import pytest
import torch
from verl.workers.utils.padding import response_from_nested

from kit.delta_models import ROOTS, TEXTS, delta_model, no_casts, patches_undone
from kit.tiny_engine import Trajectories, batch, build_engine, gloo_rank, infer, on_ranks, single_rank
from kit.tiny_models import exact_norms
from verl_credit.host.engine import log_prob_engine
from verl_credit.host.engine.attention_proof import _attention, prove
from verl_credit.policy.attention.implementation import chosen
from verl_credit.turns.score.branches import plan_branches

ROWS = [(5, 12), (3, 20), (5, 1), (7, 90), (5, 17), (2, 1)]
TEMPERATURE = 0.7
CHECKPOINTED = {"enable_gradient_checkpointing": True}
LORA = {"lora_rank": 4, "target_modules": "all-linear"}
PADDED = {"engine": {"pad_to_length": True, "pad_to_length_bucket": 64}}
CASES = {"qwen3_next": ("qwen3_next", CHECKPOINTED), "qwen3_5": ("qwen3_5", CHECKPOINTED | PADDED)}
MORE = {
    f"{family}, {name}": (family, options)
    for family in (*TEXTS, *ROOTS)
    for name, options in {
        "plain": {"enable_gradient_checkpointing": False},
        "checkpointed": CHECKPOINTED,
        "a padded tail": CHECKPOINTED | PADDED,
    }.items()
}
ADAPTERS = {"qwen3_5_text": CHECKPOINTED, "qwen3_next": {"enable_gradient_checkpointing": False}}


@pytest.fixture(scope="module", autouse=True)
def process():
    with patches_undone(), single_rank():
        yield


@pytest.fixture
def built(tmp_path):
    """The engine in float64 and transformers' model with the same weights."""

    @contextmanager
    def of(family, options, **settings):
        model = delta_model(family)
        model.save_pretrained(tmp_path)
        with no_casts(model):
            engine = build_engine(str(tmp_path), precision="fp64", training=True, **options, **settings)
            yield engine, exact_norms(model.double())

    return of


def summed(model_output, data, dp_group=None):
    rows = response_from_nested(model_output["log_probs"], data["response_mask"])
    return sum(row.sum() for row in rows.unbind()), {}


def measured(engine, turns, **settings):
    """(log-probs per row, {parameter: gradient}) by the engine."""
    data = {"temperature": TEMPERATURE, "max_token_len_per_gpu": 128} | settings
    rows = infer(engine, batch(turns, **data))["log_probs"].unbind()
    chosen(
        engine.module_attention
    )  # the trial with gradients has to run outside checkpointed layers, as `prove` has it
    with engine.train_mode():
        engine.optimizer_zero_grad()
        engine.forward_backward_batch(batch(turns, **data), summed)
        named = engine.module.named_parameters()
        gradients = {name: w.grad.full_tensor() for name, w in named if w.grad is not None}
        engine.optimizer_zero_grad()
    return [row[:-1].clone() for row in rows], gradients


def by_transformers(model, turns):
    rows = []
    for prompt, response in zip(turns.prompt_ids, turns.response_ids, strict=True):
        ids = torch.tensor(prompt + response)
        logits = model(input_ids=ids[None], use_cache=False).logits[0, :-1] / TEMPERATURE
        log_probs = logits.log_softmax(-1).gather(1, ids[1:, None])[:, 0]
        log_probs[len(prompt) - 1 :].sum().backward()
        rows.append(log_probs.detach())
    return rows, {name: w.grad for name, w in model.named_parameters() if w.grad is not None}


def require_same(ours, theirs):
    for one, other in zip(ours[0], theirs[0], strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-6)
    assert theirs[1].keys() <= ours[1].keys()
    for name, gradient in ours[1].items():
        other = theirs[1].get(name, torch.zeros_like(gradient))  # verl runs the vision model, times 0
        assert (gradient - other).norm() <= 1e-6 * other.norm(), name


@pytest.mark.slow
@pytest.mark.parametrize("case", [*CASES, *(pytest.param(case, marks=pytest.mark.nightly) for case in MORE)])
def test_packed_rows_are_single_rows(case, built):
    family, options = (CASES | MORE)[case]
    turns = Trajectories(ROWS)
    with built(family, options) as (engine, model):
        require_same(measured(engine, turns), by_transformers(model, turns))


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3_5_text", pytest.param("qwen3_next", marks=pytest.mark.nightly)])
def test_with_an_adapter_too(family, built):
    """Against single rows through the same engine with transformers' own layers."""
    turns = Trajectories(ROWS)
    with built(family, ADAPTERS[family] | LORA) as (engine, _):
        ours = measured(engine, turns)
        with _attention(engine, "eager"):
            alone = measured(engine, turns, use_dynamic_bsz=False, micro_batch_size_per_gpu=1)
    assert any("linear_attn" in name and "lora" in name for name in ours[1])
    require_same(ours, alone)


def rank_main(rank, ranks, folder, store, results):
    with gloo_rank(rank, ranks, store):
        for attention in ("auto", "sdpa"):
            with mock.patch.object(log_prob_engine, "refuse_model"):
                engine = build_engine(folder, attention=attention)
            try:
                results[attention, rank] = prove(engine, 61)
            except RuntimeError as error:
                results[attention, rank] = str(error)


@pytest.mark.nightly
def test_two_ranks_agree(tmp_path):
    delta_model("qwen3_5_text").save_pretrained(tmp_path)
    found = on_ranks(2, rank_main, tmp_path)
    assert found["auto", 0] == found["auto", 1] and "packed rows read as alone" in found["auto", 0]
    assert found["sdpa", 0] == found["sdpa", 1] and "attn_implementation=auto" in found["sdpa", 0]


@pytest.mark.slow
def test_the_start_proves_it_and_branches_are_refused(built):
    turns = Trajectories(ROWS)
    with built("qwen3_5_text", {}) as (engine, _):
        assert "packed rows read as alone within" in prove(engine, 61)
        assert "have it each (Gated-DeltaNet layers)" in engine.describe_log_probs()
        with pytest.raises(
            ValueError, match="info_gain_scorer=branch cannot score qwen3_5_text.*use rows or server"
        ):
            infer(engine, batch(turns, plan_branches(turns.requests(), turns)))


@pytest.mark.slow
def test_another_attention_that_packs_is_refused_with_the_keys_that_are_exact(built):
    refuses = pytest.raises(RuntimeError, match="packed rows read as alone within [1-9]")
    unchecked = mock.patch.object(log_prob_engine, "refuse_model")  # it knows from the config.json
    with unchecked, built("qwen3_5_text", {}, attention="sdpa") as (engine, _), refuses as refused:
        prove(engine, 61)
    text = str(refused.value)
    assert "attn_implementation=auto, actor_rollout_ref.model.use_remove_padding=true and" in text
    assert "algorithm.info_gain_scorer=rows or server" in text


@pytest.mark.slow
def test_padded_rows_are_accepted(built):
    with built("qwen3_5_text", {"use_remove_padding": False}, attention="sdpa") as (engine, _):
        assert "attention: sdpa; padded rows read as alone within" in prove(engine, 61)
