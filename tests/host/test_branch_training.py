"""Training through verl's FSDP2 engine with our attention, in float64: gradients of a pack are those of its rows."""

import pytest
import torch

from kit.tiny_engine import TRUNKS, Trajectories, batch, build_engine, gloo_rank, on_ranks
from kit.tiny_models import VOCABULARY, in_float64, log_probs, tiny_model

pytestmark = pytest.mark.slow

MODES = {
    "plain": {"enable_gradient_checkpointing": False},
    "checkpointed": {"enable_gradient_checkpointing": True},
}
FAMILIES = ("qwen3", "mistral")


def loss_of(model_output, data, dp_group=None):
    """-Σ log p; the last log-prob of a row is of the next row's first token."""
    return -sum(row[:-1].sum() for row in model_output["log_probs"].unbind()), {}


def gradients(engine, data) -> dict:
    engine.optimizer_zero_grad()
    engine.forward_backward_batch(data, loss_of)
    return {name: weight.grad.full_tensor().clone() for name, weight in engine.module.named_parameters()}


def rank_main(rank, ranks, folder, store, results):
    with gloo_rank(rank, ranks, store):
        from verl_credit.host.engine.attention_proof import prove
        from verl_credit.policy.attention import sdpa

        build, made = sdpa._mask, []

        def mask(pack, first, last, keys, window, device):
            made.append((last - first, window))
            return build(pack, first, last, keys, window, device)

        for family in FAMILIES:
            for mode, options in MODES.items():
                engine = build_engine(f"{folder}/{family}", precision="fp64", training=True, **options)
                prove(engine, VOCABULARY)  # tries its kernel, which makes masks of its own
                settings = {"temperature": 1.0, "calculate_entropy": False, "max_token_len_per_gpu": 256}
                sdpa._mask = mask
                with engine.train_mode():
                    found = gradients(engine, batch(Trajectories(TRUNKS), **settings))
                sdpa._mask = build
                results[family, mode] = {"gradients": found, "masks": list(made)}
                made.clear()


def by_rows(family) -> dict:
    """Every row alone, with transformers' own attention and without FSDP."""
    model, turns = in_float64(tiny_model(family, "sdpa")), Trajectories(TRUNKS)
    with torch.enable_grad():
        for prompt, response in zip(turns.prompt_ids, turns.response_ids, strict=True):
            (-log_probs.__wrapped__(model, prompt + response).sum()).backward()
    return {name: weight.grad for name, weight in model.named_parameters()}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    for family in FAMILIES:
        tiny_model(family, attention="sdpa").save_pretrained(folder / family)
    return on_ranks(1, rank_main, folder)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_of_a_pack_are_those_of_its_rows(family, mode, trained):
    found, expected = trained[family, mode]["gradients"], by_rows(family)
    assert found.keys() == expected.keys() and max(float(g.abs().max()) for g in expected.values()) > 1
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-9, atol=1e-9, msg=name)


@pytest.mark.parametrize("mode", MODES)
def test_masks_are_made_once_though_layers_are_computed_again(mode, trained):
    window, lengths = 7, [prompt + response for prompt, response in TRUNKS]
    assert sorted(trained["mistral", mode]["masks"]) == sorted((n, window) for n in lengths if n > window)
    assert not trained["qwen3", mode]["masks"]
