"""Shapes: exact parameter counts against transformers' own models, published totals, bytes of the KV cache by hand."""

import json
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM

from kit.families import family_config
from kit.tiny_models import tiny_config
from verl_credit.errors import ConfigError
from verl_credit.recipe.plan.model_shape import FAMILIES, shape_of


def built(config):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).eval()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tied", [True, False])
def test_the_formulas_count_is_that_of_the_model(family, tied):
    config = tiny_config(family, tie_word_embeddings=tied)
    assert shape_of(config.to_dict()).parameters == sum(p.numel() for p in built(config).parameters())


def test_a_mix_of_dense_and_expert_layers_is_counted():
    config = tiny_config("qwen3_moe", num_hidden_layers=4, mlp_only_layers=[0], decoder_sparse_step=2)
    shape = shape_of(config.to_dict())
    assert (shape.expert_layers, shape.dense_layers) == (2, 2)
    assert shape.parameters == sum(p.numel() for p in built(config).parameters())


# Totals of the published checkpoints, tied weights counted once.
@pytest.mark.parametrize(
    "name, parameters",
    [
        ("smollm2-135m", 134_515_008),
        ("Qwen/Qwen3-4B", 4_022_468_096),
        ("Qwen/Qwen3-8B", 8_190_735_360),
        ("Qwen/Qwen2.5-7B-Instruct", 7_615_616_512),
        ("Qwen/Qwen3-30B-A3B", 30_532_122_624),
    ],
)
def test_published_totals(name, parameters):
    assert shape_of(name).parameters == parameters


def test_kv_bytes_of_qwen3_4b_by_hand():
    """Keys and values, 36 layers, 8 KV heads of 128, 2 bytes: not from the hidden size, and not 28 layers."""
    assert shape_of("Qwen/Qwen3-4B").kv_bytes_per_token(2) == 2 * 36 * 8 * 128 * 2 == 147_456


def test_variants_share_a_shape_and_differ_in_their_positions():
    for name, positions in (("Qwen/Qwen3-4B-Base", 32768), ("/models/Qwen3-4B-Instruct-2507", 262144)):
        assert shape_of(name) == replace(shape_of("Qwen/Qwen3-4B"), positions=positions)


def test_a_folder_goes_before_a_name(tmp_path):
    folder = tmp_path / "Qwen3-4B"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(tiny_config("qwen3").to_dict()))
    assert (shape_of(folder).layers, shape_of(folder).positions) == (2, 256)
    (folder / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="not JSON"):
        shape_of(folder)


@pytest.mark.parametrize(
    "model, says",
    [
        ("acme/unheard-of", "acme/unheard-of"),
        ({"model_type": "acme"}, "model_type=acme lacks"),
        (
            {"model_type": "mixtral", "num_local_experts": 8},
            "model_type=mixtral .num_local_experts.*plan.model=",
        ),
        ({"model_type": "qwen3_next", "linear_num_key_heads": 2}, "linear_num_key_heads"),
    ],
)
def test_what_cannot_be_planned_is_refused_by_name(model, says):
    with pytest.raises(ConfigError, match=says):
        shape_of(model)


@pytest.mark.parametrize(
    "name, share", [("mistral", 0), ("gemma2", 0.01), ("phi3", 0.01), ("smollm3", 0), ("exaone4", 0.01)]
)
def test_another_dense_decoder_counts_as_a_llama_of_its_sizes(name, share):
    config = family_config(name)
    shape = shape_of(config.to_dict())
    assert shape.estimated and not shape_of(tiny_config("qwen3").to_dict()).estimated
    assert shape.parameters == pytest.approx(sum(p.numel() for p in built(config).parameters()), rel=share)


@pytest.mark.slow
@pytest.mark.parametrize("rank", [1, 8])
@pytest.mark.parametrize("name", FAMILIES)
def test_adapters_are_counted_as_peft_makes_them(name, rank):
    """The largest matrix, too, and those of packed experts."""
    import peft

    shape = shape_of((config := tiny_config(name)).to_dict())
    wanted = peft.LoraConfig(r=rank, target_modules="all-linear", task_type="CAUSAL_LM")
    wrapped = peft.get_peft_model(built(config), wanted)
    sizes = [p.numel() for p in wrapped.parameters() if p.requires_grad]
    assert (shape.lora_parameters(rank), shape.lora_matrix(rank)) == (sum(sizes), max(sizes))
