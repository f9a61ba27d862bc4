"""Tiny causal language models of several families, and what they say of a row read on its own."""

from __future__ import annotations

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from verl_credit.policy.attention.implementation import install
from verl_credit.policy.attention.pack import PACK

VOCABULARY = 61
SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "attention_dropout": 0.0,
}
FAMILIES = {
    "qwen2": {},
    "qwen3": {},
    "qwen3_moe": {
        "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
    "mistral": {"sliding_window": 7},
    "gemma2": {
        "sliding_window": 7, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0,
        "query_pre_attn_scalar": 8,
    },
}  # fmt: skip


def tiny_config(family: str, **changes):
    return AutoConfig.for_model(family, **SHAPE | FAMILIES.get(family, {}) | changes)


def tiny_model(family: str, attention: str = "auto", dtype=torch.float32, seed: int = 0, **changes):
    """Weights large enough that attention matters."""
    install()
    torch.manual_seed(seed)
    config = tiny_config(family, **changes)
    options = (
        {"experts_implementation": "eager"} if "moe" in family else {}
    )  # the grouped kernels know no float64
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention, dtype=dtype, **options)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() > 1:
                torch.nn.init.normal_(weight, std=0.25)
            elif "norm" in name:
                weight.add_(0.1 * torch.randn_like(weight))
    return model.to(dtype).eval()


CENTRED = ("Gemma", "Qwen3Next", "Qwen3_5")
"""Norms whose weight is the difference to 1."""


def in_float64(model):
    return exact_norms(model).double()


def exact_norms(model):
    """Norms that do not cast to float32, where every method would look exact to the last bit."""
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            eps = getattr(module, "variance_epsilon", None) or module.eps
            offset = 1.0 if type(module).__name__.startswith(CENTRED) else 0.0

            def forward(x, module=module, eps=eps, offset=offset):
                return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * (offset + module.weight)

            module.forward = forward
    return model


@torch.no_grad()
def log_probs(model, ids, positions=None, pack=None):
    """log p(token t + 1 | ...) for every token but the last, of one stream."""
    ids = torch.as_tensor(ids)
    positions = torch.arange(len(ids)) if positions is None else positions
    extra = {} if pack is None else {PACK: pack}
    logits = model(input_ids=ids[None], position_ids=positions[None], use_cache=False, **extra).logits[0]
    return logits[:-1].log_softmax(dim=-1).gather(1, ids[1:, None])[:, 0]
