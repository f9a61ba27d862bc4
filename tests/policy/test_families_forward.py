"""Claims of the table of families on tiny models: what was refused falsely is exact, and what is refused is not."""

from itertools import accumulate

import pytest
import torch

from kit.families import VOCABULARY, family_config, family_model, since
from kit.tiny_models import log_probs
from verl_credit.policy.attention.implementation import install
from verl_credit.policy.attention.pack import pack_rows
from verl_credit.policy.families import family_of

BORDER, EXACT, WRONG = 40, 1e-4, 0.1  # nats
LENGTHS = (30, 17, 23)
LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 8, "long_factor": [8.0] * 8,
            "original_max_position_embeddings": BORDER}  # fmt: skip
CHANGES = {
    "llama_dynamic": {"max_position_embeddings": BORDER},
    "phi3_longrope": {"rope_parameters": LONGROPE, "original_max_position_embeddings": BORDER},
    "doge": {"keep_window_size": BORDER},
    "deepseek_v4": {"index_topk": 4},
    "gemma2": {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
    "qwen2_moe": {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1},
}


def model_of(name, attention):
    install()
    return family_model(family_config(name, **CHANGES.get(name, {})), attention)


def rows_of(*lengths):
    draw = torch.Generator().manual_seed(0)
    return [torch.randint(3, VOCABULARY, (n,), generator=draw) for n in lengths]


def packed(model, rows, positions, pack=None):
    """log p of every row's tokens but the first, from one stream."""
    flat = log_probs(model, torch.cat(rows), positions, pack)
    ends = list(accumulate(len(row) for row in rows))
    return [flat[end - len(row) : end - 1] for row, end in zip(rows, ends, strict=True)]


def padded(model, rows):
    """The same from a batch with padding on the right."""
    widest = max(map(len, rows))
    ids, mask, places = (torch.zeros(len(rows), widest, dtype=torch.long) for _ in range(3))
    for number, row in enumerate(rows):
        ids[number, : len(row)], mask[number, : len(row)] = row, 1
        places[number, : len(row)] = torch.arange(len(row))
    with torch.no_grad():
        logits = model(input_ids=ids, attention_mask=mask, position_ids=places, use_cache=False).logits
    log_p = logits.log_softmax(-1)
    return [log_p[n, : len(row) - 1].gather(1, row[1:, None])[:, 0] for n, row in enumerate(rows)]


def off(name, attention, rows, *, pads=False):
    """The largest difference of packed or padded rows from each row alone under eager."""
    alone = [log_probs(model_of(name, "eager"), row) for row in rows]
    if pads:
        found = padded(model_of(name, attention), rows)
    else:
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


REFUSED = [("granite4_dense", "sdpa"), ("gemma2", "sdpa"), ("bamba", "sdpa"), ("gpt_oss", "eager")]


@pytest.mark.parametrize("name, attention", REFUSED)
def test_what_the_table_refuses_is_wrong(name, attention):
    assert family_of(model_of(name, "eager").config).fault(attention, True) is not None
    if name == "gemma2" and since("5.21"):
        with pytest.raises(ValueError, match="does not support .*scaled_dot_product_attention"):
            model_of(name, attention)
        return
    assert off(name, attention, rows_of(*LENGTHS)) > WRONG


def test_a_mask_that_drops_tokens_of_long_rows_is_refused_because_short_ones_do_not_show_it():
    assert family_of(model_of("doge", "eager").config).refused
    assert off("doge", "eager", rows_of(BORDER, *LENGTHS)) < EXACT
    assert off("doge", "eager", rows_of(20, BORDER + 20)) > WRONG


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt_oss", "bamba", "gemma2", "granite4_dense"])
def test_padded_rows_are_exact_where_packed_ones_are_refused(name):
    attention = family_of(model_of(name, "eager").config).stock[0]
    assert off(name, attention, rows_of(*LENGTHS), pads=True) < EXACT


@pytest.mark.slow
def test_transformers_attention_reads_packed_rows_apart_where_ours_is_not_called():
    row = family_of(model_of("qwen2_moe", "eager").config)
    assert row.chosen()[:2] == ("sdpa", True) and not row.ours
    assert off("qwen2_moe", "sdpa", rows_of(*LENGTHS)) < EXACT


@pytest.mark.slow
@pytest.mark.parametrize("name", ["nemotron_h", "zamba2", "glm_moe_dsa", "deepseek_v4"])
def test_models_without_an_exact_way_differ_with_padding_too(name):
    assert family_of(model_of(name, "eager").config).refused
    # Sparse attention selects in longer rows alone.
    assert off(name, "eager", rows_of(57, 120, 33), pads=True) > 10 * EXACT


@pytest.mark.parametrize("name", ["llama_dynamic", "phi3_longrope"])
@pytest.mark.parametrize("attention", ["auto", "sdpa"])
def test_a_row_beyond_the_border_moves_the_rows_beside_it(name, attention):
    assert family_of(model_of(name, attention).config).longest == BORDER
    assert off(name, attention, rows_of(BORDER, *LENGTHS)) < EXACT
    short, long = rows_of(20, BORDER + 20)
    assert off(name, attention, [short, long]) > WRONG
