"""The supervised start: its loss by hand, its learning rate, and that it learns what the policy wrote alone."""

import copy

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from verl_credit.worlds.real.multihop import WarmStart, train

DEMOS = [([5, 6, 7, 8, 9, 10], [0, 0, 1, 1, 0, 1]), ([3, 4, 3], [0, 1, 0])]


@pytest.fixture
def model():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=12, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, tie_word_embeddings=True,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def by_hand(model):
    """Mean over the four tokens that the policy wrote of - log p, each from a forward of its own prefix in float32."""
    wrong = []
    for ids, mask in DEMOS:
        for at in range(1, len(ids)):
            if mask[at]:
                logits = model(torch.tensor([ids[:at]])).logits[0, -1]
                wrong.append(-logits.log_softmax(-1)[ids[at]].item())
    assert len(wrong) == 4
    return sum(wrong) / 4


def test_the_loss_is_the_mean_over_the_tokens_of_the_policy(model):
    expected = by_hand(model)
    (loss,) = train(model, DEMOS, WarmStart(epochs=1, batch=2), seed=0)
    assert loss == pytest.approx(expected, abs=0.02)  # the forward is in bf16


@pytest.mark.slow
def test_it_learns(model):
    before = by_hand(model)
    steps = []
    train(
        model,
        DEMOS,
        WarmStart(epochs=40, batch=1, lr=0.02),
        0,
        lambda step, of, loss: steps.append((step, of)),
    )
    assert steps == [(n, 80) for n in range(1, 81)]
    assert by_hand(model) < 0.1 < before
    assert not model.training


def test_the_first_update_has_a_fraction_of_the_learning_rate(model):
    """AdamW's first step moves every weight by the learning rate: lr / warmup."""
    before = copy.deepcopy(model.state_dict())
    train(model, DEMOS, WarmStart(epochs=1, batch=2, lr=1e-2, warmup=5), 0)
    moved = (
        model.state_dict()["model.layers.0.mlp.up_proj.weight"] - before["model.layers.0.mlp.up_proj.weight"]
    ).abs()
    assert moved.max().item() == pytest.approx(2e-3, rel=0.01)
