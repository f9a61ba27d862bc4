"""Models and text for parts that need only torch and transformers."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import torch

from gpu.machine import ROOT
from verl_credit.policy.attention.implementation import choose, install, named
from verl_credit.policy.attention.kernels import KERNELS, Heads
from verl_credit.recipe.plan.model_shape import PUBLISHED, ModelShape

SHAPES = {"node8": "qwen3-4b", "node4": "qwen3-4b", "h100x1": "qwen3-4b", "spark": "qwen3-4b"}
TINY = ModelShape("qwen3-tiny", "qwen3", 2, 64, 4, 2, 16, 192, 1024, True)


def shape_for(setting) -> ModelShape:
    """The shape of the recipes' model."""
    return TINY if setting.tiny else PUBLISHED[SHAPES[setting.hardware]]


def random_model(shape: ModelShape, device: str, dtype: torch.dtype, attention: str = "auto"):
    """A model with seeded random weights; for `auto` and our other names the caller passes a pack."""
    from transformers import AutoModelForCausalLM

    install()
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config_of(shape), attn_implementation=attention, dtype=dtype)
    return model.to(device, dtype).eval()


def config_of(shape: ModelShape):
    from transformers import AutoConfig

    return AutoConfig.for_model(
        shape.family, vocab_size=shape.vocabulary, hidden_size=shape.hidden, num_hidden_layers=shape.layers,
        intermediate_size=shape.intermediate, num_attention_heads=shape.heads, num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim, tie_word_embeddings=shape.tied, max_position_embeddings=40960, rope_theta=1e6,
    )  # fmt: skip


def load(setting, dtype: torch.dtype):
    """(model, name of it): the weights of ``--model``, or random ones of the recipes' shape."""
    if setting.model:
        from transformers import AutoModelForCausalLM

        install()
        # use_safetensors: no pickle is read
        model = AutoModelForCausalLM.from_pretrained(
            setting.model, attn_implementation="auto", dtype=dtype, use_safetensors=True
        )
        return model.to(setting.device).eval(), f"weights of {Path(setting.model).name}"
    shape = shape_for(setting)
    return random_model(shape, setting.device, dtype), f"random weights of {shape.name}'s shape"


def english(setting) -> tuple[torch.Tensor, str]:
    """(token ids of the project's own pages, how they were made): real text that every checkout has."""
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    text = "\n".join(page.read_text(encoding="utf-8") for page in pages)
    if setting.model:
        from transformers import AutoTokenizer

        ids = AutoTokenizer.from_pretrained(setting.model)(text, add_special_tokens=False)["input_ids"]
        return torch.tensor(ids), "README.md and docs/*.md in the model's tokens"
    return torch.tensor(list(text.encode())), "README.md and docs/*.md, a token per byte"


def forward_script():
    """evidence/information_gain/forward.py as a module."""
    path = ROOT / "evidence" / "information_gain" / "forward.py"
    spec = importlib.util.spec_from_file_location("information_gain_forward", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def heads_of(config) -> Heads:
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return Heads(config.num_attention_heads, config.num_key_value_heads, size)


def kernels(setting, dtype: torch.dtype, heads: Heads) -> dict[str, str]:
    """Every kernel -> why it does not run here; "" if it passes the trial of a run's start."""

    found = {}
    for name in KERNELS:
        if setting.device == "cpu" and name == "flex":
            found[name] = "" if dtype == torch.float32 else "uncompiled on a CPU: shown in float32 only"
            continue
        try:
            choose(named(name), torch.device(setting.device), dtype, heads)
            found[name] = ""
        except RuntimeError as error:
            found[name] = str(error)
    return found


def give_back(device: str) -> None:
    if device == "cuda":
        torch.cuda.empty_cache()
