"""One tiny causal language model per family of transformers, with windows that a short row leaves."""

from __future__ import annotations

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from kit.missing_families import MISSING

VOCABULARY = 97
WINDOW = 9
_SHAPE = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 256,
    "pad_token_id": 0, "bos_token_id": None, "eos_token_id": None, "attention_dropout": 0.0,
}  # fmt: skip
_MIX = ["full_attention", "sliding_attention"] * 2
_DELTA = ["linear_attention", "full_attention"] * 2
_EXPERTS = {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "num_local_experts": 4,
    "n_routed_experts": 4, "n_shared_experts": 1, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
}  # fmt: skip
_DELTA_NET = {
    "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4, "layer_types": _DELTA, "shared_expert_intermediate_size": 24,
}  # fmt: skip
_ROPE = {"rope_theta": 10000.0, "rope_type": "default", "partial_rotary_factor": 0.5}
_LATENT = {
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8,
    "num_key_value_heads": 4, "head_dim": 4,
}  # fmt: skip
_MAMBA = {
    "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 1, "mamba_expand": 2,
    "mamba_d_conv": 4, "mamba_chunk_size": 16, "mamba_num_heads": 4, "mamba_head_dim": 16, "ssm_state_size": 8,
    "n_groups": 1, "expand": 2, "chunk_size": 16, "mamba_dt_rank": 4, "use_mamba_kernels": False,
}  # fmt: skip
FAMILIES: dict[str, dict] = {
    "qwen2": {},
    "qwen2_swa": {"use_sliding_window": True, "sliding_window": WINDOW, "layer_types": _MIX},
    "qwen3": {},
    "qwen3_swa": {"use_sliding_window": True, "sliding_window": WINDOW, "layer_types": _MIX},
    "qwen3_moe": _EXPERTS,
    "qwen3_moe_swa": _EXPERTS | {"use_sliding_window": True, "sliding_window": WINDOW},
    "qwen2_moe": _EXPERTS | {"shared_expert_intermediate_size": 24},
    "qwen3_next": _EXPERTS | _DELTA_NET,
    "qwen3_5_text": _DELTA_NET | {"rope_parameters": _ROPE | {"mrope_section": [1, 1, 0]}},
    "qwen3_5_moe_text": _EXPERTS | _DELTA_NET | {"rope_parameters": _ROPE | {"mrope_section": [1, 1, 0]}},
    "llama": {},
    "llama_yarn": {
        "rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 10000.0,
                            "original_max_position_embeddings": 32},
    },
    "llama4_text": {
        "attention_chunk_size": WINDOW, "intermediate_size_mlp": 48, "num_local_experts": 4,
        "layer_types": ["chunked_attention", "full_attention"] * 2, "no_rope_layers": [1, 0, 1, 0],
    },
    "gemma": {},
    "gemma2": {"sliding_window": WINDOW, "query_pre_attn_scalar": 8, "attn_logit_softcapping": 2.0, "layer_types": _MIX},
    "gemma3_text": {"sliding_window": WINDOW, "query_pre_attn_scalar": 8, "layer_types": _MIX},
    "gemma3n_text": {
        "sliding_window": WINDOW, "layer_types": _MIX, "num_kv_shared_layers": 2, "laurel_rank": 8,
        "vocab_size_per_layer_input": VOCABULARY, "hidden_size_per_layer_input": 8,
        "activation_sparsity_pattern": [0.0] * 4, "intermediate_size": [48] * 4,
    },
    "gemma4_text": {
        "sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"] * 2, "num_kv_shared_layers": 0,
        "vocab_size_per_layer_input": VOCABULARY, "hidden_size_per_layer_input": 8, "global_head_dim": 8,
    },
    "gemma4_shared": {
        "sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"] * 2, "num_kv_shared_layers": 2,
        "vocab_size_per_layer_input": VOCABULARY, "hidden_size_per_layer_input": 8, "global_head_dim": 16,
    },
    "mistral": {"sliding_window": None},
    "mistral_swa": {"sliding_window": WINDOW},
    "ministral": {"sliding_window": WINDOW, "layer_types": _MIX},
    "ministral3": {},
    "mixtral": {"sliding_window": None, "num_local_experts": 4},
    "mixtral_swa": {"sliding_window": WINDOW, "num_local_experts": 4},
    "phi": {},
    "phi3": {},
    "phi3_swa": {"sliding_window": WINDOW},
    "phimoe": {"num_local_experts": 4},
    "glm": {},
    "glm4": {},
    "glm4_moe": _EXPERTS,
    "glm4_moe_lite": _EXPERTS | _LATENT,
    "glm_moe_dsa": _EXPERTS | _LATENT | {"index_topk": WINDOW, "index_head_dim": 8, "index_n_heads": 2},
    "gpt_oss": {"num_local_experts": 4, "sliding_window": WINDOW, "layer_types": _MIX},
    "deepseek_v2": _EXPERTS | _LATENT,
    "deepseek_v3": _EXPERTS | _LATENT | {"v_head_dim": 6},
    "olmo2": {},
    "olmo3": {"sliding_window": WINDOW, "layer_types": _MIX},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "olmo_hybrid": _DELTA_NET,
    "smollm3": {"layer_types": None},
    "granite": {"attention_multiplier": 0.35},
    "granitemoe": {"attention_multiplier": 0.35, "num_local_experts": 4, "num_experts_per_tok": 2},
    "granitemoehybrid": _MAMBA
    | {"num_local_experts": 4, "shared_intermediate_size": 24, "layer_types": ["mamba", "attention"] * 2},
    "granite4_dense": _MAMBA | {"num_local_experts": 0, "shared_intermediate_size": 24, "layer_types": ["attention"] * 4},
    "cohere": {"logit_scale": 1.0},
    "cohere2": {"logit_scale": 1.0, "sliding_window": WINDOW, "layer_types": _MIX},
    "falcon_h1": _MAMBA | {"mamba_d_ssm": 64},
    "bamba": _MAMBA | {"attn_layer_indices": [1, 3]},
    "nemotron": {},
    "nemotron_h": _MAMBA | _EXPERTS | {"layers_block_type": ["mamba", "attention", "mamba", "moe"]},
    "zamba2": _MAMBA | {"layers_block_type": ["mamba", "hybrid"] * 2, "num_mem_blocks": 1, "mamba_ngroups": 1},
    "jamba": _MAMBA | {"num_experts": 2, "attn_layer_period": 2, "attn_layer_offset": 1},
    "mamba2": {"num_heads": 4, "head_dim": 16, "state_size": 8, "n_groups": 1, "expand": 2, "chunk_size": 16},
    "minimax": {"num_local_experts": 4, "layer_types": _DELTA, "block_size": 16},
    "minimax_m2": _EXPERTS,
    "ernie4_5": {},
    "ernie4_5_moe": {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 24},
    "hunyuan_v1_dense": {},
    "hunyuan_v1_moe": {"num_experts": 4, "moe_topk": 2},
    "seed_oss": {},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2, "conv_L_cache": 3},
    "lfm2_moe": _EXPERTS | {"layer_types": ["conv", "full_attention"] * 2, "conv_L_cache": 3, "num_dense_layers": 1},
    "exaone4": {"sliding_window": WINDOW, "layer_types": _MIX},
    "starcoder2": {"sliding_window": None},
    "starcoder2_swa": {"sliding_window": WINDOW},
    "stablelm": {},
    "apertus": {},
    "arcee": {},
    "helium": {},
    "dots1": _EXPERTS | {"sliding_window": WINDOW, "layer_types": _MIX},
    "longcat_flash": _LATENT
    | {"n_routed_experts": 4, "zero_expert_num": 2, "moe_topk": 2, "expert_ffn_hidden_size": 24, "ffn_hidden_size": 48,
       "num_layers": 2},
    "afmoe": _EXPERTS | {"sliding_window": WINDOW, "layer_types": _MIX, "num_dense_layers": 1},
    "nanochat": {},
    "bitnet": {},
    "doge": {"keep_window_size": WINDOW},
    "diffllama": {},
    "flex_olmo": {"num_experts": 4, "num_experts_per_tok": 2},
    "gpt_neox": {},
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "bloom": {},
    "youtu": _LATENT | {"v_head_dim": 6},
    "solar_open": _EXPERTS,
    "exaone_moe": _EXPERTS | {"sliding_window": WINDOW, "layer_types": _MIX, "mlp_layer_types": ["dense", "sparse"] * 2},
    "hy_v3": _EXPERTS,
    "jais2": {},
    "cohere2_moe": _EXPERTS | {"logit_scale": 1.0, "sliding_window": WINDOW, "layer_types": _MIX},
    "laguna": _EXPERTS | {"sliding_window": WINDOW, "layer_types": _MIX, "mlp_layer_types": ["dense", "sparse"] * 2},
    "deepseek_v4": {},
    "mellum": _EXPERTS | {"sliding_window": WINDOW, "layer_types": _MIX},
}  # fmt: skip
for _family in MISSING:
    del FAMILIES[_family]
_TYPE = {"gemma4_shared": "gemma4_text", "granite4_dense": "granitemoehybrid"}


def config_of(family: str, **changes):
    kind = _TYPE.get(family, family.removesuffix("_swa").removesuffix("_yarn"))
    return AutoConfig.for_model(kind, **_SHAPE | FAMILIES[family] | changes)


def model_of(config, attention: str, seed: int = 0):
    """Weights large enough that attention matters, in float32."""
    torch.manual_seed(seed)
    auto = AutoModelForImageTextToText if hasattr(config, "text_config") else AutoModelForCausalLM
    model = auto.from_config(config, attn_implementation=attention, dtype=torch.float32)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() > 1:
                torch.nn.init.normal_(weight, std=0.5 if "conv" in name else 0.15)
            elif "norm" in name:
                weight.add_(0.1 * torch.randn_like(weight))
            elif "sinks" in name:
                torch.nn.init.normal_(weight)
            elif name.endswith("A_log"):
                weight.fill_(-1.0)  # under fast decay the rule over chunks itself rounds by more than 1e-5
    return model.eval()


@torch.inference_mode()
def row_log_probs(model, row: list[int]) -> torch.Tensor:
    """log p(token t + 1 | ...) of a row alone, in one forward without a cache."""
    logits = model(input_ids=torch.tensor([row]), use_cache=False).logits[0].float()
    return logits[:-1].log_softmax(dim=-1).gather(1, torch.tensor(row)[1:, None])[:, 0]
