"""The shape of a model from its Hugging Face config: sizes, parameter counts, bytes of the KV cache."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from os.path import expanduser, isfile  # pathlib raises for a missing home, and for a name that is too long
from pathlib import Path

from verl_credit.errors import ConfigError

FAMILIES = ("llama", "qwen2", "qwen3", "qwen3_moe")
"""The families for which the formulas below are exact. Any other dense decoder counts as a llama of its sizes."""
OTHER_LAYERS = re.compile("expert|kv_lora_rank|mamba|ssm|linear_num|conv|state_size")
"""The keys of a config.json whose layers have no formula: experts, latent attention, recurrent and convolution layers."""


@dataclass(frozen=True)
class ModelShape:
    """A decoder. The formulas are those of the families above. Counts are numbers, not bytes."""

    name: str
    family: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int
    tied: bool
    attention_bias: bool = False
    experts: int = 0
    active_experts: int = 0
    expert_intermediate: int = 0
    expert_layers: int = 0
    positions: int | None = None
    """max_position_embeddings, the longest row; None when the config lacks it."""

    @property
    def q_width(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        return self.kv_heads * self.head_dim

    @property
    def attention_linear(self) -> int:
        """Weights of the four projections of a layer, without biases."""
        return self.hidden * (2 * self.q_width + 2 * self.kv_width)

    @property
    def _attention(self) -> int:
        qkv_bias = self.family == "qwen2" or self.attention_bias
        bias = (self.q_width + 2 * self.kv_width) * qkv_bias
        bias += self.hidden * (self.attention_bias and self.family != "qwen2")
        return self.attention_linear + bias + 2 * self.head_dim * self.has_head_norms

    @property
    def has_head_norms(self) -> bool:
        """Queries and keys are normalised per head."""
        return self.family.startswith("qwen3")

    @property
    def dense_mlp(self) -> int:
        return 3 * self.hidden * self.intermediate

    @property
    def expert_mlp(self) -> int:
        """All experts of a layer and their router."""
        return self.experts * 3 * self.hidden * self.expert_intermediate + self.experts * self.hidden

    @property
    def active_mlp(self) -> int:
        """Weights that one token uses in an expert layer."""
        return self.active_experts * 3 * self.hidden * self.expert_intermediate + self.experts * self.hidden

    @property
    def largest_layer(self) -> int:
        """Parameters of the largest decoder layer; FSDP gathers one layer at a time."""
        mlp = max(self.expert_mlp if self.expert_layers else 0, self.dense_mlp if self.dense_layers else 0)
        return self._attention + mlp + 2 * self.hidden

    @property
    def down_projection(self) -> int:
        """Weights of an MLP's last matrix, or of all experts' last ones."""
        dense = self.hidden * self.intermediate if self.dense_layers else 0
        return max(dense, self.experts * self.hidden * self.expert_intermediate)

    @property
    def dense_layers(self) -> int:
        return self.layers - self.expert_layers

    @property
    def embedding(self) -> int:
        """The input embedding, or the output head."""
        return self.vocabulary * self.hidden

    @property
    def embeddings(self) -> int:
        """Input embedding and, when untied, the output head."""
        return self.embedding * (1 if self.tied else 2)

    @property
    def parameters(self) -> int:
        """Exactly ``sum(p.numel() for p in model.parameters())``."""
        mlp = self.dense_layers * self.dense_mlp + self.expert_layers * self.expert_mlp
        per_layer = self._attention + 2 * self.hidden
        return self.embeddings + self.layers * per_layer + mlp + self.hidden

    @property
    def matmul_per_token(self) -> int:
        """Weights that a token is multiplied with: layers (active experts) and output head, not the embedding."""
        return self.layer_matmul_per_token + self.vocabulary * self.hidden

    @property
    def layer_matmul_per_token(self) -> int:
        mlp = self.dense_layers * self.dense_mlp + self.expert_layers * self.active_mlp
        return self.layers * self.attention_linear + mlp

    def kv_bytes_per_token(self, bytes_per_number: float = 2) -> int:
        """Keys and values of all layers: 2 x layers x KV heads x head size x bytes."""
        return int(2 * self.layers * self.kv_width * bytes_per_number)

    @property
    def estimated(self) -> bool:
        """Counted by the formulas of another family."""
        return self.family not in FAMILIES

    def lora_parameters(self, rank: int) -> int:
        """Adapters of ``target_modules=all-linear``, as peft makes them: on every linear module of the layers.

        peft takes the packed experts for as many matrices, with twice the rank where gate and up are one, and the router
        for another.
        """
        h, q, kv, f, e = self.hidden, self.q_width, self.kv_width, self.intermediate, self.experts
        attention = (h + q) + 2 * (h + kv) + (q + h)
        width = self.expert_intermediate
        experts = e * (2 * (h + 2 * width) + (width + h)) + (h + e)
        return rank * (
            self.layers * attention + self.dense_layers * 3 * (h + f) + self.expert_layers * experts
        )

    def lora_matrix(self, rank: int) -> int:
        """The largest matrix of these adapters."""
        dense = self.intermediate if self.dense_layers else 0
        experts = 2 * self.experts * max(self.hidden, 2 * self.expert_intermediate)
        return rank * max(self.hidden, self.q_width, dense, experts if self.expert_layers else 0)


# From each published config.json, so that a plan needs no network.
PUBLISHED = {
    shape.name: shape
    for shape in (
        ModelShape("smollm2-135m", "llama", 30, 576, 9, 3, 64, 1536, 49152, True, positions=8192),
        ModelShape("qwen3-0.6b", "qwen3", 28, 1024, 16, 8, 128, 3072, 151936, True, positions=40960),
        ModelShape("qwen3-1.7b", "qwen3", 28, 2048, 16, 8, 128, 6144, 151936, True, positions=40960),
        ModelShape("qwen3-4b", "qwen3", 36, 2560, 32, 8, 128, 9728, 151936, True, positions=40960),
        ModelShape("qwen3-8b", "qwen3", 36, 4096, 32, 8, 128, 12288, 151936, False, positions=40960),
        ModelShape("qwen2.5-7b", "qwen2", 28, 3584, 28, 4, 128, 18944, 152064, False, positions=131072),
        ModelShape(
            "qwen3-30b-a3b", "qwen3_moe", 48, 2048, 32, 4, 128, 6144, 151936, False,
            experts=128, active_experts=8, expert_intermediate=768, expert_layers=48, positions=40960,
        ),
    )
}  # fmt: skip
# Variants of these models differ only in their positions.
_SUFFIXES = {"-base": 32768, "-instruct": 32768, "-instruct-2507": 262144, "-thinking-2507": 262144}


def shape_of(model: str | Path | Mapping) -> ModelShape:
    """A config (mapping), a model folder, or the name of a published model. Raises `ConfigError`."""
    if isinstance(model, Mapping):
        return _from_config(model, str(model.get("_name_or_path") or model.get("model_type")))
    folder = Path(expanduser(model))
    config = folder / "config.json"
    if isfile(config):
        try:
            return _from_config(json.loads(config.read_text(encoding="utf-8")), str(model))
        except json.JSONDecodeError as error:
            raise ConfigError(f"{config} is not JSON: {error}") from error
    name, positions = folder.name.lower(), None
    for suffix in sorted(_SUFFIXES, key=len, reverse=True):
        if name not in PUBLISHED and name.endswith(suffix):
            name, positions = name.removesuffix(suffix), _SUFFIXES[suffix]
    if name not in PUBLISHED:
        raise ConfigError(
            f"model {model}: no config.json there and not a known name; give plan.model=FOLDER or one of "
            f"{', '.join(PUBLISHED)}"
        )
    return PUBLISHED[name] if positions is None else replace(PUBLISHED[name], positions=positions)


def _from_config(config: Mapping, name: str) -> ModelShape:
    family, experts = config.get("model_type"), {}
    others = [key for key, value in config.items() if value and OTHER_LAYERS.search(key)]
    if family not in FAMILIES and others:
        raise ConfigError(
            f"{name}: the plan has no formulas for layers of model_type={family} ({', '.join(others)}); give the config of "
            "a model of about that size: plan.model={model_type: llama, hidden_size: ..., ...}"
        )
    try:
        sizes = ("num_hidden_layers", "hidden_size", "num_attention_heads")
        layers, hidden, heads = (config[key] for key in sizes)
        if family == "qwen3_moe":
            every, dense = config.get("decoder_sparse_step", 1), set(config.get("mlp_only_layers") or ())
            experts = {
                "experts": config["num_experts"] if "num_experts" in config else config["num_local_experts"],
                "active_experts": config["num_experts_per_tok"],
                "expert_intermediate": config["moe_intermediate_size"],
                "expert_layers": sum(i not in dense and (i + 1) % every == 0 for i in range(layers)),
            }
        return ModelShape(
            name=name, family=str(family), layers=layers, hidden=hidden, heads=heads,
            kv_heads=config.get("num_key_value_heads") or heads,
            # transformers' default for older files without head_dim.
            head_dim=config.get("head_dim") or (128 if family == "qwen3" else hidden // heads),
            intermediate=config["intermediate_size"], vocabulary=config["vocab_size"],
            tied=bool(config.get("tie_word_embeddings", False)),
            attention_bias=bool(config.get("attention_bias", False)),
            positions=config.get("max_position_embeddings"), **experts,
        )  # fmt: skip
    except KeyError as error:
        raise ConfigError(f"{name}: the config of model_type={family} lacks {error}") from error
