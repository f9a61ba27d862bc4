"""Shapes: exact parameter counts against transformers' own models, published totals, bytes of the KV cache by hand."""

import json
from dataclasses import replace

import pytest

from kit.tiny_models import tiny_config, tiny_model
from verl_credit.errors import ConfigError
from verl_credit.recipe.plan.model_shape import shape_of

FAMILIES = ("llama", "qwen2", "qwen3", "qwen3_moe")


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tied", [True, False])
def test_the_count_is_that_of_the_model(family, tied):
    from transformers import AutoModelForCausalLM

    config = tiny_config(family, tie_word_embeddings=tied)
    model = AutoModelForCausalLM.from_config(config)
    assert shape_of(config.to_dict()).parameters == sum(p.numel() for p in model.parameters())


def test_a_mix_of_dense_and_expert_layers_is_counted():
    from transformers import AutoModelForCausalLM

    config = tiny_config("qwen3_moe", num_hidden_layers=4, mlp_only_layers=[0], decoder_sparse_step=2)
    shape = shape_of(config.to_dict())
    assert (shape.expert_layers, shape.dense_layers) == (2, 2)
    assert shape.parameters == sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())


@pytest.mark.parametrize("rank", [1, 8])
@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_adapters_are_counted_as_peft_makes_them(family, rank):
    import peft

    model = tiny_model(family)
    shape = shape_of(model.config.to_dict())
    wrapped = peft.get_peft_model(
        model, peft.LoraConfig(r=rank, target_modules="all-linear", task_type="CAUSAL_LM")
    )
    assert shape.lora_parameters(rank) == sum(p.numel() for p in wrapped.parameters() if p.requires_grad)


# Totals of the published checkpoints, tied weights counted once.
@pytest.mark.parametrize(
    "name, parameters",
    [
        ("smollm2-135m", 134_515_008),
        ("Qwen/Qwen3-0.6B", 596_049_920),
        ("Qwen/Qwen3-1.7B", 1_720_574_976),
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


@pytest.mark.parametrize(
    "name, positions",
    [
        ("Qwen/Qwen3-4B-Base", 32768),
        ("qwen3-4b", 40960),
        ("/models/Qwen3-4B-Instruct-2507", 262144),
    ],
)
def test_variants_share_a_shape_and_differ_in_their_positions(name, positions):
    assert shape_of(name) == replace(shape_of("Qwen/Qwen3-4B"), positions=positions)
    assert shape_of("Qwen/Qwen2.5-7B-Instruct").positions == 32768


def test_positions_are_those_of_the_config():
    assert shape_of(tiny_config("qwen3").to_dict()).positions == 256


def test_a_folder_goes_before_a_name(tmp_path):
    folder = tmp_path / "Qwen3-4B"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(tiny_config("qwen3").to_dict()))
    assert shape_of(folder).layers == 2


@pytest.mark.parametrize(
    "model, says",
    [
        ("acme/unheard-of", "acme/unheard-of"),
        ({"model_type": "gpt2"}, "model_type='gpt2'"),
        ({"model_type": "qwen3", "hidden_size": 8}, "lacks"),
    ],
)
def test_what_cannot_be_planned_is_refused_by_name(model, says):
    with pytest.raises(ConfigError, match=says):
        shape_of(model)


def test_a_broken_config_is_named(tmp_path):
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="not JSON"):
        shape_of(tmp_path)
