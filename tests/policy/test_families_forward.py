"""Claims of the table of families on tiny models: what was refused falsely is exact, and what is refused is not."""

from itertools import accumulate

import pytest
import torch

from kit.tiny_models import VOCABULARY, log_probs, tiny_model
from verl_credit.policy.attention.pack import pack_rows
from verl_credit.policy.families import family_of

BORDER, EXACT, WRONG = 40, 1e-4, 0.1  # nats
LENGTHS = (30, 17, 23)
LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [8.0] * 4,
            "original_max_position_embeddings": BORDER}  # fmt: skip
MAMBA = {"mamba_d_state": 8, "mamba_d_head": 8, "mamba_n_heads": 8, "mamba_n_groups": 1, "mamba_expand": 2}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
MODELS = {
    "granite4_dense": ("granitemoehybrid", {**MAMBA, "layer_types": ["attention"] * 2, "num_local_experts": 0}),
    "llama_dynamic": ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4},
                                "max_position_embeddings": BORDER}),
    "phi3_longrope": ("phi3", {"rope_parameters": LONGROPE, "original_max_position_embeddings": BORDER}),
    "afmoe": ("afmoe", {**EXPERTS, "num_experts": 4, "moe_intermediate_size": 24, "sliding_window": 7}),
    "gemma2": ("gemma2", {}),
    "bamba": ("bamba", {**MAMBA, "attn_layer_indices": [1]}),
    "gpt_oss": ("gpt_oss", EXPERTS),
}  # fmt: skip


def model_of(name, attention):
    family, changes = MODELS[name]
    return tiny_model(family, attention=attention, **changes)


def rows_of(*lengths):
    draw = torch.Generator().manual_seed(0)
    return [torch.randint(3, VOCABULARY, (n,), generator=draw) for n in lengths]


def packed(model, rows, positions, pack=None):
    """log p of every row's tokens but the first, from one stream."""
    flat = log_probs(model, torch.cat(rows), positions, pack)
    ends = list(accumulate(len(row) for row in rows))
    return [flat[end - len(row) : end - 1] for row, end in zip(rows, ends, strict=True)]


def off(name, attention, rows):
    """The largest difference of packed rows from each row alone under eager."""
    alone = [log_probs(model_of(name, "eager"), row) for row in rows]
    restarting = torch.cat([torch.arange(len(row)) for row in rows])
    pack = pack_rows([len(row) for row in rows]) if attention == "auto" else None
    found = packed(model_of(name, attention), rows, restarting, pack)
    return max(float((a - b).abs().max()) for a, b in zip(found, alone, strict=True))


@pytest.mark.parametrize("name", ["granite4_dense", "llama_dynamic", "phi3_longrope", "afmoe"])
def test_our_attention_is_exact_where_the_table_says_so(name):
    model = model_of(name, "auto")
    assert family_of(model.config).fault("auto", True, "branch") is None
    assert off(name, "auto", rows_of(*LENGTHS)) < EXACT
    (row,), answer = rows_of(30), torch.tensor([5, 6, 7, 8])
    pack = pack_rows([len(row)], [[(12, len(answer))]])
    found = log_probs(model, torch.cat([row, answer]), pack.position_ids(), pack)[-3:]
    alone = log_probs(model_of(name, "eager"), torch.cat([row[:12], answer]))[-3:]
    assert float((found - alone).abs().max()) < EXACT


@pytest.mark.parametrize("name, attention", [("granite4_dense", "sdpa"), ("afmoe", "eager"), ("gemma2", "sdpa"),
                                             ("bamba", "sdpa"), ("gpt_oss", "eager")])  # fmt: skip
def test_what_the_table_refuses_is_wrong(name, attention):
    assert family_of(model_of(name, attention).config).fault(attention, True) is not None
    assert off(name, attention, rows_of(*LENGTHS)) > WRONG


@pytest.mark.parametrize("name", ["llama_dynamic", "phi3_longrope"])
@pytest.mark.parametrize("attention", ["auto", "sdpa"])
def test_a_row_beyond_the_border_moves_the_rows_beside_it(name, attention):
    assert family_of(model_of(name, attention).config).longest == BORDER
    assert off(name, attention, rows_of(BORDER, *LENGTHS)) < EXACT
    short, long = rows_of(20, BORDER + 20)
    assert off(name, attention, [short, long]) > WRONG
