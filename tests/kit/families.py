"""A tiny config of every family of decoders that is trained today, and of variants that take other paths; models of them."""

from __future__ import annotations

import torch
import transformers
from packaging.version import Version
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

WINDOW = 20
VOCABULARY = 997
SHAPE = {
    "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
_LOCAL = {"num_local_experts": 4, "num_experts_per_tok": 2}
_ROUTED = {
    "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "n_shared_experts": 1, "n_group": 1,
    "topk_group": 1, "first_k_dense_replace": 1,
}  # fmt: skip
_MLA = {
    "kv_lora_rank": 32, "q_lora_rank": 48, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16, "head_dim": 8,
    "num_key_value_heads": 4,
}  # fmt: skip
_MIXED = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"] * 2}
_HYBRID = {"layer_types": ["linear_attention"] * 3 + ["full_attention"]}
_LINEAR = {
    "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
}  # fmt: skip
_MAMBA = {
    "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_n_groups": 1, "mamba_expand": 2,
    "mamba_chunk_size": 16,
}  # fmt: skip
_SPARSE = {"decoder_sparse_step": 1, "mlp_only_layers": []}
# The rotary embedding of a model that was trained on 64 tokens, stretched to 512.
_ROPE = {"rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 64}
_LONGROPE = {
    "rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 320, "short_factor": [1.0] * 8,
    "long_factor": [4.0] * 8,
}  # fmt: skip


def _rope(kind: str, **more) -> dict:
    return {"rope_parameters": {"rope_type": kind, **_ROPE, **more}}


# name -> (model_type, changes of SHAPE)
FAMILIES: dict[str, tuple[str, dict]] = {
    "qwen2": ("qwen2", {}),
    "qwen2_swa": ("qwen2", {"use_sliding_window": True, "max_window_layers": 2, "sliding_window": WINDOW}),
    "qwen3": ("qwen3", {}),
    "qwen3_swa": ("qwen3", {"use_sliding_window": True, "max_window_layers": 2, "sliding_window": WINDOW}),
    "qwen3_moe": ("qwen3_moe", {**EXPERTS, **_SPARSE}),
    "qwen3_moe_swa": (
        "qwen3_moe",
        {**EXPERTS, **_SPARSE, "use_sliding_window": True, "sliding_window": WINDOW},
    ),
    "qwen2_moe": ("qwen2_moe", {**EXPERTS, **_SPARSE, "shared_expert_intermediate_size": 48}),
    "qwen3_next": ("qwen3_next", {**EXPERTS, **_LINEAR, **_HYBRID, "shared_expert_intermediate_size": 48}),
    "qwen3_5_text": ("qwen3_5_text", {**_LINEAR, **_HYBRID}),
    "qwen3_5_moe_text": (
        "qwen3_5_moe_text",
        {**EXPERTS, **_LINEAR, **_HYBRID, "shared_expert_intermediate_size": 48},
    ),
    "llama": ("llama", {}),
    "llama3_rope": ("llama", _rope("llama3", low_freq_factor=1.0, high_freq_factor=4.0)),
    "llama_yarn": ("llama", _rope("yarn")),
    "llama_dynamic": ("llama", _rope("dynamic")),
    "llama4_text": (
        "llama4_text",
        {
            **_LOCAL, "num_experts_per_tok": 1, "interleave_moe_layer_step": 2, "attention_chunk_size": 32,
            "intermediate_size_mlp": 96, "layer_types": ["chunked_attention"] * 3 + ["full_attention"],
            "no_rope_layers": [1, 1, 1, 0],
        },
    ),
    "gemma": ("gemma", {}),
    "gemma2": ("gemma2", {**_MIXED, "query_pre_attn_scalar": 16}),
    "gemma3_text": ("gemma3_text", {**_MIXED, "query_pre_attn_scalar": 16}),
    "gemma3n_text": (
        "gemma3n_text",
        {
            **_MIXED, "intermediate_size": [96] * 4, "hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": 997,
            "num_kv_shared_layers": 0, "activation_sparsity_pattern": [0.0] * 4, "laurel_rank": 8,
        },
    ),
    "gemma4_text": (
        "gemma4_text",
        {
            **_MIXED, "global_head_dim": 32, "num_global_key_value_heads": 2, "hidden_size_per_layer_input": 16,
            "vocab_size_per_layer_input": 997, "num_kv_shared_layers": 0,
        },
    ),
    "mistral": ("mistral", {"sliding_window": None}),
    "mistral_swa": ("mistral", {"sliding_window": WINDOW}),
    "ministral": ("ministral", _MIXED),
    "ministral3": ("ministral3", {}),
    "mixtral": ("mixtral", _LOCAL),
    "mixtral_swa": ("mixtral", {**_LOCAL, "sliding_window": WINDOW}),
    "phi": ("phi", {}),
    "phi3": ("phi3", {"sliding_window": None}),
    "phi3_swa": ("phi3", {"sliding_window": WINDOW}),
    "phi3_longrope": (
        "phi3",
        {"rope_parameters": _LONGROPE, "original_max_position_embeddings": 320, "sliding_window": None},
    ),
    "phimoe": ("phimoe", _LOCAL),
    "glm": ("glm", {}),
    "glm4": ("glm4", {}),
    "glm4_moe": ("glm4_moe", _ROUTED),
    "glm4_moe_lite": ("glm4_moe_lite", {**_ROUTED, **_MLA}),
    "glm_moe_dsa": (
        "glm_moe_dsa",
        {**_ROUTED, **_MLA, "index_n_heads": 2, "index_head_dim": 16, "index_topk": 16},
    ),
    "gpt_oss": ("gpt_oss", {**_LOCAL, **_MIXED}),
    "deepseek_v2": ("deepseek_v2", {**_ROUTED, **_MLA, "topk_method": "greedy"}),
    "deepseek_v3": ("deepseek_v3", {**_ROUTED, **_MLA}),
    "deepseek_v3_vdim": ("deepseek_v3", {**_ROUTED, **_MLA, "qk_nope_head_dim": 16}),
    "deepseek_v4": (
        "deepseek_v4",
        {**_ROUTED, "num_key_value_heads": 1, "q_lora_rank": 48, "index_topk": 16, "index_n_heads": 2},
    ),
    "olmo2": ("olmo2", {}),
    "olmo3": ("olmo3", _MIXED),
    "olmoe": ("olmoe", {**EXPERTS, "intermediate_size": 48}),
    "olmo_hybrid": ("olmo_hybrid", {**_LINEAR, **_HYBRID, "linear_num_key_heads": 4}),
    "flex_olmo": ("flex_olmo", {**EXPERTS, "intermediate_size": 48}),
    "smollm3": ("smollm3", {}),
    "granite": ("granite", {"attention_multiplier": 0.25}),
    "granitemoe": ("granitemoe", {**_LOCAL, "attention_multiplier": 0.25}),
    "granitemoehybrid": (
        "granitemoehybrid",
        {
            **_MAMBA, **_LOCAL, "attention_multiplier": 0.25, "shared_intermediate_size": 48,
            "layer_types": ["mamba"] * 3 + ["attention"],
        },
    ),
    "granite4_dense": (
        "granitemoehybrid",
        {
            **_MAMBA, "num_local_experts": 0, "num_experts_per_tok": 0, "attention_multiplier": 0.25,
            "shared_intermediate_size": 96, "layer_types": ["attention"] * 4, "position_embedding_type": "rope",
        },
    ),
    "cohere": ("cohere", {}),
    "cohere2": ("cohere2", _MIXED),
    "cohere2_moe": ("cohere2_moe", {**EXPERTS, **_MIXED}),
    "falcon_h1": ("falcon_h1", {**_MAMBA, "mamba_d_ssm": 128}),
    "bamba": ("bamba", {**_MAMBA, "attn_layer_indices": [3]}),
    "nemotron_h": (
        "nemotron_h",
        {
            **_ROUTED, "layers_block_type": ["mamba", "attention", "moe", "mamba"], "mamba_num_heads": 8,
            "mamba_head_dim": 16, "ssm_state_size": 16, "n_groups": 1, "chunk_size": 16, "mamba_n_groups": 1,
            "moe_shared_expert_intermediate_size": 48,
        },
    ),
    "zamba2": (
        "zamba2",
        {
            "mamba_d_state": 16, "n_mamba_heads": 8, "mamba_expand": 2, "mamba_headdim": 16, "mamba_ngroups": 1,
            "num_key_value_heads": 4, "attention_hidden_size": 128, "attention_head_dim": 32, "chunk_size": 16,
            "num_mem_blocks": 1, "layers_block_type": ["mamba", "mamba", "hybrid", "mamba"], "hybrid_layer_ids": [2],
            "adapter_rank": 8,
        },
    ),
    "jamba": (
        "jamba",
        {
            "num_experts": 4, "num_experts_per_tok": 2, "mamba_d_state": 16, "mamba_dt_rank": 8, "attn_layer_period": 4,
            "attn_layer_offset": 3, "use_mamba_kernels": False,
        },
    ),
    "minimax": ("minimax", {**_LOCAL, "layer_types": ["linear_attention", "full_attention"] * 2, "block_size": 16}),
    "minimax_m2": ("minimax_m2", {**_LOCAL, "intermediate_size": 48}),
    "ernie4_5": ("ernie4_5", {}),
    "ernie4_5_moe": (
        "ernie4_5_moe",
        {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 48, "moe_num_shared_experts": 1},
    ),
    "hunyuan_v1_dense": ("hunyuan_v1_dense", {}),
    "hunyuan_v1_moe": ("hunyuan_v1_moe", {"num_experts": 4, "moe_topk": 2}),
    "seed_oss": ("seed_oss", {}),
    "lfm2": ("lfm2", {"layer_types": ["conv", "conv", "full_attention", "conv"], "block_auto_adjust_ff_dim": False}),
    "lfm2_moe": (
        "lfm2_moe",
        {**EXPERTS, "layer_types": ["conv", "conv", "full_attention", "conv"], "num_dense_layers": 1},
    ),
    "exaone4": ("exaone4", {**_MIXED, "sliding_window_pattern": "LG"}),
    "exaone_moe": ("exaone_moe", {**EXPERTS, **_MIXED, "num_shared_experts": 1}),
    "starcoder2": ("starcoder2", {"sliding_window": WINDOW}),
    "apertus": ("apertus", {}),
    "arcee": ("arcee", {}),
    "helium": ("helium", {}),
    "dots1": ("dots1", _ROUTED),
    "longcat_flash": (
        "longcat_flash",
        {
            **_MLA, "num_layers": 2, "n_routed_experts": 4, "moe_topk": 2, "zero_expert_num": 2, "ffn_hidden_size": 96,
            "expert_ffn_hidden_size": 48,
        },
    ),
    "afmoe": ("afmoe", {**EXPERTS, **_MIXED, "num_dense_layers": 1, "num_shared_experts": 1}),
    "nanochat": ("nanochat", {"num_key_value_heads": 4}),
    "bitnet": ("bitnet", {}),
    "doge": ("doge", {}),
    "gpt_neox": ("gpt_neox", {"num_key_value_heads": 4}),
    "youtu": ("youtu", {**_MLA, "qk_nope_head_dim": 16}),
    "solar_open": ("solar_open", _ROUTED),
    "hy_v3": ("hy_v3", {**EXPERTS, "num_shared_experts": 1}),
    "jais2": ("jais2", {}),
    "laguna": (
        "laguna",
        {**EXPERTS, **_MIXED, "num_attention_heads_per_layer": [4] * 4, "shared_expert_intermediate_size": 48},
    ),
    "mellum": ("mellum", {**EXPERTS, **_SPARSE}),
}  # fmt: skip


def since(version: str) -> bool:
    """Is the installed transformers this version or a later one?"""
    return Version(transformers.__version__) >= Version(version)


# The installed transformers does not have these. Only these five may be missing, in the oldest of our range.
MISSING = {
    name for name in ("hy_v3", "cohere2_moe", "laguna", "deepseek_v4", "mellum") if name not in CONFIG_MAPPING
}


def family_config(name: str, **changes):
    """The tiny config of a row of the table."""
    model_type, own = FAMILIES[name]
    return AutoConfig.for_model(model_type, **SHAPE | own | changes)


def family_model(config, attention: str):
    """Weights large enough that attention, sinks and convolutions matter, in float32."""
    torch.manual_seed(0)
    auto = AutoModelForImageTextToText if hasattr(config, "text_config") else AutoModelForCausalLM
    model = auto.from_config(config, attn_implementation=attention, dtype=torch.float32)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() > 1:
                torch.nn.init.normal_(weight, std=0.5 if "conv" in name else 0.11)
            elif "norm" in name:
                weight.add_(0.1 * torch.randn_like(weight))
            elif "sinks" in name:
                torch.nn.init.normal_(weight)
            elif name.endswith("A_log"):
                weight.fill_(-1.0)  # under fast decay the rule over chunks itself rounds by more than 1e-5
    return model.eval()
