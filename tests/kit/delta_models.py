"""Tiny models with Gated-DeltaNet layers: Qwen3-Next, Qwen3.5, Qwen3.6, as texts and under the published root config."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from unittest import mock

import torch
from transformers import AutoConfig

from kit.families import FAMILIES, SHAPE, family_config, family_model
from verl_credit.policy.attention.implementation import install

MROPE = {
    "rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5, "mrope_section": [1, 1, 0],
    "mrope_interleaved": True,
}  # fmt: skip
VISION = {
    "depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 16, "out_hidden_size": 64, "patch_size": 4,
    "num_position_embeddings": 16,
}  # fmt: skip
TOKENS = {"image_token_id": 60, "video_token_id": 59, "vision_start_token_id": 58, "vision_end_token_id": 57}
TEXTS = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
ROOTS = ("qwen3_5", "qwen3_5_moe")


def delta_config(family: str):
    if family in TEXTS:
        return family_config(family)
    text = SHAPE | FAMILIES[f"{family}_text"][1] | {"rope_parameters": MROPE}
    return AutoConfig.for_model(family, text_config=text, vision_config=VISION, **TOKENS)


def delta_model(family: str, attention: str = "eager"):
    install()
    config = delta_config(family)
    model = family_model(config, attention)
    config.get_text_config()._experts_implementation = "eager"  # the grouped kernels know no float64
    return model


@contextmanager
def patches_undone():
    """verl patches the classes of Qwen3.5 in this process when it loads such a model; afterwards they are as before."""
    from transformers.models.qwen3_5 import modeling_qwen3_5 as dense
    from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe as experts

    kinds = [
        kind
        for module in (dense, experts)
        for kind in vars(module).values()
        if isinstance(kind, type) and kind.__module__ == module.__name__ and "forward" in vars(kind)
    ]
    before = [kind.forward for kind in kinds]
    try:
        yield
    finally:
        for kind, forward in zip(kinds, before, strict=True):
            kind.forward = forward


class _Float64Torch:
    float32 = torch.float64

    def __getattr__(self, name):
        return getattr(torch, name)


@contextmanager
def no_casts(model):
    """The code of this model has no float32 inside, so that a model in float64 is exact."""
    module = sys.modules[type(model).__module__]
    with (
        mock.patch.object(module, "torch", _Float64Torch()),
        mock.patch.object(torch.Tensor, "float", torch.Tensor.double),
    ):
        yield
