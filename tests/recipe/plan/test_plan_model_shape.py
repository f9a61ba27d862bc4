"""Shapes: exact parameter counts against transformers' own models, published totals, bytes of the KV cache by hand."""

import json
from dataclasses import replace

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from kit.families import FAMILIES, SHAPE, WINDOW, family_config
from kit.tiny_models import tiny_config
from verl_credit.errors import ConfigError
from verl_credit.recipe.plan.compute import forward_flops
from verl_credit.recipe.plan.model_shape import FAMILIES as FORMULA
from verl_credit.recipe.plan.model_shape import shape_of

FAST = (
    "qwen3_swa", "mistral_swa", "gemma2", "gemma3n_text", "phi", "gpt_oss", "deepseek_v3_vdim", "qwen3_5_moe_text", "lfm2",
    "bamba",
)  # fmt: skip
# Their caches are objects of their own, without the fields of the others'.
OWN_CACHE = ("deepseek_v4", "olmo_hybrid", "minimax")


def families(*but):
    """A few families are fast tests; the others run nightly."""
    names = [name for name in FAMILIES if name not in but]
    return [pytest.param(name, marks=() if name in FAST else pytest.mark.nightly) for name in names]


def shape_in_a_folder(config):
    """From a config.json as transformers writes it: without defaults, and with objects for infinite numbers."""
    return shape_of(json.loads(config.to_json_string()))


def built(config):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).eval()


@pytest.mark.parametrize("family", FORMULA)
@pytest.mark.parametrize("tied", [True, False])
def test_the_formulas_count_is_that_of_the_model(family, tied):
    config = tiny_config(family, tie_word_embeddings=tied)
    assert shape_of(config.to_dict()).parameters == sum(p.numel() for p in built(config).parameters())


@pytest.mark.parametrize("name", families())
def test_parameters_layers_and_tying_are_those_of_the_model(name):
    model, shape = built(config := family_config(name)), shape_in_a_folder(config)
    layers = max(
        (m for m in model.modules() if isinstance(m, torch.nn.ModuleList)), key=lambda m: len(str(m))
    )
    sizes = [sum(p.numel() for p in layer.parameters()) for layer in layers]
    assert shape.parameters == sum(p.numel() for p in model.parameters())
    assert (shape.layers, shape.largest_layer) == (len(sizes), max(sizes))
    assert shape.tied == (model.get_output_embeddings().weight is model.get_input_embeddings().weight)
    assert (shape.vocabulary, shape.hidden) == tuple(model.get_input_embeddings().weight.shape)


@pytest.mark.parametrize("name", families(*OWN_CACHE))
def test_a_row_takes_as_much_cache_as_transformers_gives_it(name):
    """Keys and values of every token at their own widths, and recurrent and convolution states once."""
    tokens, config = 12, family_config(name)
    with torch.no_grad():
        output = built(config)(input_ids=torch.arange(3, 3 + tokens)[None], use_cache=True)
    kept = 0
    for layer in (output.get("past_key_values") or output.get("cache_params")).layers:
        tensors = (
            getattr(layer, part, None) for part in ("keys", "values", "conv_states", "recurrent_states")
        )
        kept += sum(t.numel() for t in tensors if torch.is_tensor(t))
    shape = shape_in_a_folder(config)
    assert tokens * shape.kv_bytes_per_token(1) + shape.state_bytes(1) == kept


@pytest.mark.parametrize(
    "name, kept",
    [
        ("mistral_swa", 4 * 64 * WINDOW),  # every layer has the window
        ("gemma2", 2 * 64 * (WINDOW + 100)),  # every second one has
        ("deepseek_v3", 4 * (32 + 8) * 100),  # the latent and the rotated key, in place of heads
        ("qwen3_next", 64 * 100 + 3 * (4 * 16 * 16 + 4 * (2 * 2 * 16 + 4 * 16))),  # one layer in four attends
    ],
)
def test_the_servers_cache_of_a_row_of_100_tokens_by_hand(name, kept):
    shape = shape_of(family_config(name).to_dict())
    assert shape.cache_bytes(100, 1) == kept
    if name == "deepseek_v3":
        assert shape.cache_bytes(100, 1, split=4) == kept  # every rank has the whole latent
    if name == "mistral_swa":
        assert shape.cache_bytes(100, 1, split=2) == kept / 2


def test_a_token_uses_only_its_experts():
    """Matrices outside the experts, two of the four experts, and the head; by hand for Mixtral's tiny shape."""
    shape, (h, f, vocabulary) = shape_of(family_config("mixtral").to_dict()), (64, 96, SHAPE["vocab_size"])
    attention, router = h * (64 + 32 + 32) + 64 * h, 4 * h
    assert shape.matmul_per_token == 4 * (attention + router + 2 * 3 * h * f) + vocabulary * h


def test_a_window_attends_to_fewer_pairs():
    """Pairs of a token and an earlier one: a triangle, then a band of the window's width."""
    whole, window = (shape_of(family_config(name).to_dict()) for name in ("mistral", "mistral_swa"))
    pairs = WINDOW**2 / 2 + (100 - WINDOW) * WINDOW
    spared = 4 * whole.q_width * whole.layers * (100**2 / 2 - pairs)
    assert forward_flops(whole, 100) - forward_flops(window, 100) == pytest.approx(spared)
    assert forward_flops(whole, 15) == forward_flops(window, 15)


def test_a_mix_of_dense_and_expert_layers_is_counted():
    config = tiny_config("qwen3_moe", num_hidden_layers=4, mlp_only_layers=[0], decoder_sparse_step=2)
    shape = shape_of(config.to_dict())
    assert (shape.expert_layers, shape.dense_layers) == (2, 2)
    assert shape.parameters == sum(p.numel() for p in built(config).parameters())


# peft refuses `all-linear` for these.
MAMBA = ("falcon_h1", "nemotron_h", "mamba2")


@pytest.mark.slow
@pytest.mark.parametrize("rank", [pytest.param(1, marks=pytest.mark.slow), 8])
@pytest.mark.parametrize(
    "name",
    ["qwen2", "qwen3", "qwen3_moe", *families("qwen2", "qwen3", "qwen3_moe", *MAMBA)],
)
def test_adapters_are_counted_as_peft_makes_them(name, rank):
    """The largest matrix, too. Packed experts get adapters in some families and none in others."""
    import peft

    shape = shape_in_a_folder(config := family_config(name))
    wanted = peft.LoraConfig(r=rank, target_modules="all-linear", task_type="CAUSAL_LM")
    wrapped = peft.get_peft_model(built(config), wanted)
    sizes = [p.numel() for p in wrapped.parameters() if p.requires_grad]
    assert shape.lora_parameters(rank) == sum(sizes)
    assert shape.lora_matrix(rank) == max(sizes)


def test_without_an_adapter_none_is_counted():
    shape = shape_of(family_config("gemma2").to_dict())
    assert (shape.lora_parameters(0), shape.lora_matrix(0), shape.without_adapters) == (0, 0, "")


@pytest.mark.parametrize(
    "name", [MAMBA[0], *(pytest.param(name, marks=pytest.mark.nightly) for name in MAMBA[1:])]
)
def test_where_peft_refuses_the_family_linear_modules_count_and_a_reason_is_given(name):
    shape = shape_of(family_config(name).to_dict())
    assert shape.lora_parameters(8) > 0 and shape.without_adapters


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
        ({"model_type": "acme"}, "model_type='acme' is unknown to transformers .*plan.model=FOLDER"),
        ({"hidden_size": 8}, "model_type=None is unknown"),
        ({"model_type": "clip"}, "no causal language model .*model_type='clip'"),
        ({"model_type": "gpt_oss", "num_hidden_layers": "x"}, "gpt_oss.*num_hidden_layers"),
        ({"model_type": "qwen3", "hidden_size": 8}, "lacks"),
    ],
)
def test_what_cannot_be_planned_is_refused_by_name(model, says):
    with pytest.raises(ConfigError, match=says):
        shape_of(model)


def test_what_is_estimated_is_said():
    """Nothing for the formulas' families; activations for the others, and the state of recurrent layers."""
    said = {name: shape_of(family_config(name).to_dict()).estimated for name in ("qwen3", "phi", "lfm2")}
    assert [len(said[name]) for name in ("qwen3", "phi", "lfm2")] == [0, 1, 2]


def test_a_bias_that_the_formula_lacks_is_counted():
    config = tiny_config("llama", mlp_bias=True)
    assert shape_of(config.to_dict()).parameters == sum(p.numel() for p in built(config).parameters())


def test_a_multimodal_model_is_counted_whole_as_verl_builds_it():
    """The vision tower takes memory; layers and the cache are the decoder's."""
    text = {**family_config("qwen3_5_text").to_dict(), "model_type": "qwen3_5_text"}
    root = AutoConfig.for_model("qwen3_5", text_config=text).to_dict()
    whole, decoder = shape_of(root), shape_of(text)
    assert whole.parameters > decoder.parameters and whole.layers == decoder.layers
    assert whole.cache_bytes(100) == decoder.cache_bytes(100)


def test_a_broken_config_is_named(tmp_path):
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="not JSON"):
        shape_of(tmp_path)
