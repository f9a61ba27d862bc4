"""Adapters on mixtures of experts: refused where peft breaks the model, with target_modules that work."""

import re

import pytest

from kit.tiny_engine import build_engine, single_rank
from kit.tiny_models import tiny_model
from verl_credit.host.actor.worker import _proven

EXPERTS = {
    "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
    "n_shared_experts": 1, "first_k_dense_replace": 1,
}  # fmt: skip
LATENT = {
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16,
    "num_key_value_heads": 4,
}  # fmt: skip
CASES = {
    "glm4_moe": (EXPERTS, ["k_proj", "o_proj", "q_proj", "v_proj"]),
    "deepseek_v3": (EXPERTS | LATENT, ["kv_a_proj_with_mqa", "kv_b_proj", "o_proj", "q_a_proj", "q_b_proj"]),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("family", CASES)
def test_all_linear_is_refused_with_layers_that_work(family, tmp_path):
    changes, names = CASES[family]
    tiny_model(family, attention="eager", **changes).save_pretrained(tmp_path)
    with single_rank():
        wrong = build_engine(str(tmp_path), lora_rank=2, target_modules="all-linear")
        says = rf"target_modules=all-linear: .*{family}.*\[{re.escape(','.join(names))}\]"
        with pytest.raises(ValueError, match=says):
            _proven(wrong)
        right = build_engine(str(tmp_path), lora_rank=2, target_modules=names)
        assert _proven(right).startswith("attention: ")


@pytest.mark.slow
def test_another_missing_attribute_is_reported_as_it_is(tmp_path):
    tiny_model("qwen3", attention="eager").save_pretrained(tmp_path)
    with single_rank():
        engine = build_engine(str(tmp_path))
        del engine.module.model.layers[0].mlp.act_fn
        with pytest.raises(AttributeError, match="act_fn"):
            _proven(engine)
