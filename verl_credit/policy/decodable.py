"""Which models this policy decodes, decided by their config.json alone, before torch or Ray."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_CACHE = "its cache is a class of its own, whose rows cannot be chosen"
_STEPS = "in transformers its steps differ by 0.1 nats from its forward of a whole row"
NOT_DECODED = {
    "deepseek_v4": _CACHE,
    "doge": "in transformers its sdpa differs by 3 nats from its eager attention",
    "glm_moe_dsa": "its indexer keeps keys in the model, not in the cache",
    "minimax": _CACHE,
    "nemotron_h": _STEPS,
    "olmo_hybrid": _CACHE,
    "zamba2": _STEPS,
}
"""model_type -> why. Every other family is decoded by its own masks and layers, and proved at the start."""

WITHOUT_SDPA = ("gpt_oss",)
"""Families whose class is built with `attn_implementation=eager`; generation computes their sinks itself."""


def why_not_decoded(config: Mapping[str, Any]) -> str | None:
    """One sentence for a config.json whose model `rollout.name=hf` cannot decode; None for every other."""
    for part in (config, config.get("text_config") or {}):
        if why := NOT_DECODED.get(part.get("model_type", "")):
            return f"hf cannot decode model_type={part['model_type']}: {why}; use actor_rollout_ref.rollout.name=vllm"
    return None


def positions(config: Mapping[str, Any]) -> int | None:
    """Tokens that a row of this text model may have; None where its config names no number.

    With longrope all positions turn by other angles once one row of a batch is longer than the model's first context,
    and keys that a cache already holds would keep the old ones.
    """
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if rope.get("rope_type", rope.get("type")) == "longrope":
        first = rope.get("original_max_position_embeddings") or config.get("original_max_position_embeddings")
        if first:
            return first
    return config.get("max_position_embeddings")
