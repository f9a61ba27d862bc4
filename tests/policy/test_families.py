"""The table of families: every variant that was measured (evidence/families), from the config that transformers writes."""

import re
from pathlib import Path

import pytest
from transformers import AutoConfig

from kit.each import each
from kit.families import FAMILIES, MISSING, family_config
from verl_credit.policy.attention.implementation import KERNELS, PREFIX
from verl_credit.policy.families import (
    ATTENTION,
    AUTO,
    DELTA_NET,
    OURS,
    PACKED,
    SCORER,
    STOCK,
    TEXT_OF,
    Keys,
    dropouts,
    family_of,
)

OURS_AND_BRANCH = Keys("auto", True, "branch")
OURS_AND_ROWS = Keys("auto", True, "rows")
PACKED_SDPA = Keys("sdpa", True, "rows")
PADDED_SDPA = Keys("sdpa", False, "rows")
PADDED_EAGER = Keys("eager", False, "rows")
REFUSED = None

WINDOW = {"sliding_window": 20}
LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 48, "long_factor": [4.0] * 48,
            "original_max_position_embeddings": 4096}  # fmt: skip
MIXING = ("olmo_hybrid", "minimax", "granitemoehybrid", "lfm2", "lfm2_moe", "falcon_h1", "bamba", "jamba")
INEXACT = ("nemotron_h", "zamba2", "glm_moe_dsa", "deepseek_v4", "phimoe", "doge")
IMAGES = ("gemma3", "llama4", "qwen2_5_vl", "qwen3_vl", "mistral3")
CHOSEN = {
    **dict.fromkeys((*DELTA_NET, *TEXT_OF), OURS_AND_ROWS),
    **dict.fromkeys((*MIXING, "llama4_text"), PADDED_SDPA),
    **dict.fromkeys((*INEXACT, *IMAGES), REFUSED),
    "gpt_oss": PADDED_EAGER,
}
"""What `auto` chooses, where it does not choose our attention and branches."""


def config_of(family, changes):
    layers = {"num_hidden_layers": len(changes["layer_types"])} if "layer_types" in changes else {}
    return AutoConfig.for_model(family, **layers, **changes)


VARIANTS = [
    (family_config(name), CHOSEN.get(name, OURS_AND_BRANCH)) for name in FAMILIES if name not in MISSING
]
VARIANTS += [(config_of(name, {}), CHOSEN[name]) for name in CHOSEN if name not in (*FAMILIES, *MISSING)]
VARIANTS += [(config_of("qwen2_moe", WINDOW | {"use_sliding_window": True}), PACKED_SDPA)]


@each("config, chosen", VARIANTS)
def test_what_auto_chooses_for_every_variant_and_that_it_is_exact(config, chosen):
    family, row = config.model_type, family_of(config)
    assert row == family_of(config.to_dict())
    assert row.refused == (chosen is REFUSED)
    if row.refused:
        key, why = row.fault("auto", True)
        assert key == "" and why.startswith((f"{family}: its ", f"{family}: it reads images"))
    else:
        assert row.chosen() == chosen
        assert row.fault(*chosen) is None
        assert row.fault(*chosen[:2], "rows") is None


@each("config, chosen", [case for case in VARIANTS if case[1] in (PADDED_SDPA, PADDED_EAGER, OURS_AND_ROWS)])
def test_transformers_attention_over_packed_rows_is_refused_where_rows_read_each_other(config, chosen):
    """The pairs that older refusals advised, off by 2 to 6 nats."""
    row = family_of(config)
    for attention in STOCK:
        for scorer in ("rows", None):
            key, why = row.fault(attention, True, scorer)
            assert key == (PACKED if attention in row.stock else ATTENTION)
            assert why.startswith(f"{config.model_type}: ") and why.endswith(f"; exact are {chosen}")
    key, why = row.fault(*chosen[:2], "branch")
    assert key == SCORER and why.endswith(f"; exact are {chosen}")


FAULTS = [  # (model_type, changes, the keys, the one that is refused)
    ("gpt_oss", {}, ("auto", True), ATTENTION),
    ("gpt_oss", {}, ("sdpa", False), ATTENTION),
    ("gpt_oss", {}, ("eager", True), PACKED),
    ("granitemoehybrid", {"layer_types": ["attention"] * 2}, ("sdpa", True), PACKED),
    ("gemma2", {}, ("sdpa", True), ATTENTION),
    ("gemma2", {}, ("sdpa", False), ATTENTION),
    ("gpt_oss", {}, ("credit_sdpa", True), ATTENTION),
    ("llama4_text", {}, ("flash_attention_2", True), PACKED),
    ("qwen3_next", {}, ("flash_attention_2", True), PACKED),
    ("qwen3_next", {}, ("auto", False), PACKED),
    ("qwen3", {}, ("credit_flex", False), PACKED),
    ("qwen3", {}, ("sdpa", True, "branch"), ATTENTION),
    ("gpt_oss", {}, ("eager", False, "branch"), SCORER),
]  # fmt: skip


@pytest.mark.parametrize("family, changes, keys, refused", FAULTS)
def test_a_wrong_key_is_named_with_the_three_that_are_exact(family, changes, keys, refused):
    row = family_of(config_of(family, changes))
    key, why = row.fault(*keys)
    assert key == refused
    assert all(name in why for name in (ATTENTION, PACKED, SCORER)) and why.endswith(str(row.chosen()))


RIGHT = [
    ("gemma2", {}, ("eager", True)),
    ("gemma2", {}, ("flash_attention_2", True)),
    ("mistral", WINDOW, ("sdpa", True, "rows")),
    ("qwen3", {}, ("eager", False, "rows")),
    ("granitemoehybrid", {"layer_types": ["attention"] * 2}, ("sdpa", False, "rows")),
    ("qwen3_5", {}, ("sdpa", False, "rows")),
    ("qwen3", {}, (None, True, "rows")),  # verl's flash_attention_2
]


@pytest.mark.parametrize("family, changes, keys", RIGHT)
def test_other_keys_that_are_exact_are_accepted(family, changes, keys):
    assert family_of(config_of(family, changes)).fault(*keys) is None


PUBLISHED = [  # what a published config.json says that transformers' own lacks: layers that only other keys set
    ({"model_type": "qwen3_next", "full_attention_interval": 4, "linear_num_key_heads": 16}, OURS_AND_ROWS),
    ({"model_type": "jamba", "attn_layer_period": 8, "mamba_d_state": 16}, PADDED_SDPA),
    ({"model_type": "lfm2", "full_attn_idxs": [2, 5], "conv_L_cache": 3}, PADDED_SDPA),
    ({"model_type": "llama4_text", "attention_chunk_size": 8192}, PADDED_SDPA),
    ({"model_type": "kimi_linear", "linear_attn_config": {"full_attn_layers": [4]}}, PADDED_SDPA),
    ({"model_type": "qwen2_5_vl_text", "rope_scaling": {"type": "mrope", "mrope_section": [8, 8]}}, PACKED_SDPA),
    ({"model_type": "nobody_knows", "hidden_size": 8}, OURS_AND_BRANCH),
    ({}, OURS_AND_BRANCH),
]  # fmt: skip


@pytest.mark.parametrize(
    "values, chosen", PUBLISHED, ids=lambda x: x.get("model_type", "{}") if isinstance(x, dict) else ""
)
def test_a_config_without_a_list_of_layers_is_read_by_its_other_keys(values, chosen):
    assert family_of(values).chosen() == chosen


@pytest.mark.parametrize("attention", ["sdpa", "flash_attention_2", None])
def test_auto_follows_the_keys_that_are_given(attention):
    dense, hybrid = family_of({"model_type": "qwen3"}), family_of({"model_type": "bamba", "mamba_d_state": 8})
    assert dense.chosen(attention) == (attention, True, "rows")
    assert hybrid.chosen(attention) == (attention, False, "rows")
    assert dense.chosen("credit_flex", AUTO, "rows") == ("credit_flex", True, "rows")
    assert dense.chosen(appends=False) == OURS_AND_ROWS


@pytest.mark.parametrize(
    "values, longest",
    [
        (
            {
                "model_type": "phi3",
                "rope_scaling": {"type": "longrope"},
                "original_max_position_embeddings": 4096,
            },
            4096,
        ),
        (
            {"model_type": "phi3", "rope_scaling": {"type": "su"}, "original_max_position_embeddings": 4096},
            4096,
        ),
        ({"model_type": "phi3", "rope_parameters": LONGROPE}, 4096),
        ({"model_type": "phi3", "rope_parameters": LONGROPE, "original_max_position_embeddings": 1024}, 1024),
        ({"model_type": "llama", "rope_scaling": {"type": "dynamic"}, "max_position_embeddings": 2048}, 2048),
        ({"model_type": "gemma4", "rope_parameters": {"full_attention": LONGROPE}}, 4096),
        ({"model_type": "llama", "rope_scaling": {"type": "yarn"}, "max_position_embeddings": 2048}, None),
    ],
)
def test_the_length_at_which_positions_change(values, longest):
    assert family_of(values).longest == longest


def test_the_names_of_our_attention_are_those_of_its_kernels():
    assert (AUTO, *(PREFIX + kernel for kernel in KERNELS)) == OURS


def test_dropouts_that_transformers_adds_to_a_config_without_them_are_known():
    family = "seed_oss"
    written = AutoConfig.for_model(family).to_dict()
    assert dropouts({"model_type": family}) == dropouts(written) != {}
    assert dropouts(dict.fromkeys(dropouts(written), 0.0) | {"model_type": family}) == {}


def test_dropouts_of_a_text_model_have_its_section_and_those_of_no_layer_are_left_out():
    text = {"model_type": "qwen3_5_text", "attention_dropout": 0.1, "router_jitter_noise": 0.0}
    assert dropouts({"model_type": "qwen3_5", "text_config": text}) == {"text_config.attention_dropout": 0.1}
    values = {
        "resid_pdrop": 0.1,
        "summary_first_dropout": 0.1,
        "classifier_dropout": 0.1,
        "dropout": None,
        "drop": "x",
    }
    assert dropouts({"model_type": "gpt2", **values}) == {"resid_pdrop": 0.1}


def pages_rows():
    page = (Path(__file__).parents[2] / "docs" / "attention.md").read_text(encoding="utf-8")
    table = page[page.index("| families |") :].partition("\n\n")[0].splitlines()[2:]
    for line in table:
        _, names, attention, packed, scorer, *_ = (cell.strip(" `") for cell in line.split("|"))
        chosen = None if attention == "refused" else Keys(attention, packed == "true", scorer)
        yield from ((name, chosen) for name in re.findall(r"`(\w+)`", f"{names}`"))


@each("family, chosen", [row for row in pages_rows() if row[0] not in MISSING])
def test_the_page_of_families_is_the_table(family, chosen):
    row = family_of(AutoConfig.for_model(family))
    assert (None if row.refused else row.chosen()) == chosen
