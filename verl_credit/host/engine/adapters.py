"""Adapters (LoRA) that a model cannot compute with: peft wraps routers of some mixtures of experts, whose blocks then fail.

`target_modules=all-linear` does so for glm4_moe, deepseek_v3, dots1 and phimoe in peft 0.21. The first forward shows it.
"""

from __future__ import annotations

import torch


def refuse_adapter(engine, error: AttributeError) -> None:
    """Raises ValueError with layers that can have adapters, if the engine's model has any; otherwise returns."""
    names = attention_projections(engine.module)
    if not names:
        return
    config = engine.model_config
    raise ValueError(
        f"actor_rollout_ref.model.target_modules={config.target_modules}: peft has wrapped a layer of "
        f"{config.hf_config.model_type} that the model cannot call then ({error}); accepted are its attention projections, "
        f"[{','.join(names)}]"
    ) from error


def attention_projections(model: torch.nn.Module) -> list[str]:
    """The names of the attention's linear layers that have an adapter."""
    wrapped = [name.split(".") for name, layer in model.named_modules() if hasattr(layer, "lora_A")]
    return sorted({path[-1] for path in wrapped if "self_attn" in path})
