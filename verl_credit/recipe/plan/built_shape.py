"""The shape of any decoder that transformers can build, counted on the model itself, which is built without memory.

A formula per family would have to follow every release of transformers. The model on torch's meta device has the shape of
every weight and none of its bytes; it takes the import of transformers (3 s) and at most a second.
"""

from __future__ import annotations

import importlib.metadata
import json
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple

from verl_credit.errors import ConfigError
from verl_credit.lazy import torch
from verl_credit.recipe.plan.model_shape import ModelShape

ESTIMATED = "activations (a Qwen layer's formula with this model's widths; other families keep 30 % less to 40 % more)"
RECURRENT = (
    "the state of recurrent layers (from config.json; the FLOPs of their recurrence are not counted, and without fla their "
    "activations are three to four times the estimate)"
)
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_ACTIVE = ("num_experts_per_tok", "moe_topk", "moe_k", "top_k_experts")
# Keys whose product is the recurrent state of a layer, one tuple for each convention of transformers' configs.
_STATES = (
    ("linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim"),
    ("mamba_n_heads", "mamba_d_head", "mamba_d_state"),
    ("mamba_num_heads", "mamba_head_dim", "ssm_state_size"),
    ("n_mamba_heads", "mamba_headdim", "mamba_d_state"),
    ("num_heads", "head_dim", "state_size"),
    ("intermediate_size", "state_size"),
    ("mamba_expand", "hidden_size", "mamba_d_state"),
    ("num_attention_heads", "head_dim", "head_dim"),
)
_PROJECTIONS = {"k_proj", "kv_b_proj", "qkv_proj", "query_key_value", "c_attn", "Wqkv", "att_proj"}
"""A module with one of these children is an attention block."""


@dataclass(frozen=True)
class BuiltShape(ModelShape):
    """Counts of a built model instead of the formulas of `ModelShape`."""

    parameters: int = 0
    largest_layer: int = 0
    down_projection: int = 0
    """The largest matrix of a layer, of packed experts all of them: at least as large as the last one."""
    layer_matmul_per_token: int = 0
    outside: int = 0
    """Parameters of no layer: embeddings, head, last norm."""
    config_json: str = ""
    """The config that the counts belong to; adapters are counted on a model of it when they are asked for."""
    head_norms: bool = False
    kv_widths: tuple[int, ...] = ()
    """Numbers per token that each attention layer keeps in a cache of keys and values."""
    latent: int = 0
    """Numbers per token and layer in a cache of MLA, which vLLM keeps in place of keys and values."""
    state: int = 0
    """Numbers of all recurrent and convolution states of a row, however long it is."""
    layer_windows: tuple[int | None, ...] = ()
    estimated: tuple[str, ...] = (ESTIMATED,)

    @property
    def has_head_norms(self) -> bool:
        return self.head_norms

    @property
    def embedding(self) -> int:
        """What verl's FSDP gathers beside a layer: all that is in no layer when tied, else the half of it."""
        return self.outside if self.tied else self.outside // 2

    @property
    def windows(self) -> tuple[int | None, ...]:
        return self.layer_windows

    def kv_bytes_per_token(self, bytes_per_number: float = 2) -> int:
        return int(sum(self.kv_widths) * bytes_per_number)

    def state_bytes(self, bytes_per_number: float = 2) -> int:
        return int(self.state * bytes_per_number)

    def cache_bytes(self, tokens: float, bytes_per_number: float = 2, split: int = 1) -> float:
        """As vLLM keeps it: a window's tokens alone, MLA's latent on every rank, and the state of recurrent layers."""
        widths = (self.latent,) * len(self.kv_widths) if self.latent else self.kv_widths
        ranks = 1 if self.latent else min(split, self.kv_heads)
        kept = sum(w * min(tokens, window or tokens) for w, window in zip(widths, self.windows, strict=True))
        return bytes_per_number * (kept / ranks + self.state / split)

    def lora_parameters(self, rank: int) -> int:
        return rank * sum(_adapters(self.config_json).widths) if rank else 0

    def lora_matrix(self, rank: int) -> int:
        return rank * max(_adapters(self.config_json).widths) if rank else 0

    @property
    def without_adapters(self) -> str:
        return _adapters(self.config_json).refusal


def built_shape(config: Mapping, name: str) -> BuiltShape:
    """The shape of the model of a config.json. Raises `ConfigError` where transformers cannot build it."""
    return _shape(json.dumps(dict(config), sort_keys=True, default=str), name)


@lru_cache(maxsize=8)
def _shape(config_json: str, name: str) -> BuiltShape:
    family = json.loads(config_json).get("model_type")
    another = "give plan.model=FOLDER of a model of the same size in another family"
    try:
        return replace(_measure(*_build(config_json), str(family), name), config_json=config_json)
    except KeyError as error:
        if error.args != (family,):
            raise ConfigError(f"{name}: the config lacks {error}") from error
        raise ConfigError(
            f"{name}: model_type={family!r} is unknown to transformers {importlib.metadata.version('transformers')}; "
            f"{another}, or such a config itself: plan.model={{model_type: llama, hidden_size: ..., ...}}"
        ) from error
    except Exception as error:  # a family's own code raises whatever its values lead to
        reason = " ".join(str(error).split())[:150]
        raise ConfigError(
            f"{name}: transformers builds no causal language model of this config.json, model_type={family!r} "
            f"({type(error).__name__}: {reason}); {another}"
        ) from error


def _build(config_json: str) -> tuple[torch.nn.Module, Any]:
    """The model without memory, and the config of its decoder. verl builds a multimodal model whole."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    values = json.loads(config_json, object_hook=_with_infinity)
    config = CONFIG_MAPPING[values.get("model_type")].from_dict(values)
    multimodal = type(config) in AutoModelForImageTextToText._model_mapping
    with torch.device("meta"):
        model = (AutoModelForImageTextToText if multimodal else AutoModelForCausalLM).from_config(config)
    return model, config.get_text_config()


def _with_infinity(values: dict) -> Any:
    """transformers writes an infinite number as an object."""
    return float(values["__float__"]) if values.keys() == {"__float__"} else values


class _Adapters(NamedTuple):
    widths: list[int]
    refusal: str = ""
    """peft's words, where it makes none."""


@lru_cache(maxsize=8)
def _adapters(config_json: str) -> _Adapters:
    """Numbers of each matrix that peft adds for `target_modules=all-linear` at rank 1; it takes three seconds.

    peft has conversions of its own for packed experts of some families. Where it refuses the family, these are the
    adapters of its linear modules.
    """
    from peft import LoraConfig, get_peft_model

    model, _ = _build(config_json)
    head = model.get_output_embeddings()
    linear = [m for m in model.modules() if isinstance(m, torch.nn.Linear) and m is not head]
    found = [width for m in linear for width in (m.in_features, m.out_features)]
    try:
        with torch.device("meta"), warnings.catch_warnings():
            warnings.simplefilter(
                "ignore", RuntimeWarning
            )  # its own conversion names experts that the model lacks
            wanted = LoraConfig(r=1, target_modules="all-linear", task_type="CAUSAL_LM")
            wrapped = get_peft_model(model, wanted)
    except ValueError as error:
        return _Adapters(found, " ".join(str(error).split())[:150])
    return _Adapters([p.numel() for p in wrapped.parameters() if p.requires_grad])


def _measure(model: torch.nn.Module, config: Any, family: str, name: str) -> BuiltShape:
    layers = max((m for m in model.get_decoder().modules() if isinstance(m, torch.nn.ModuleList)), key=_count)
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings().weight
    heads = _largest(config, "num_attention_heads", "n_head", "num_heads") or 1
    latent, rope = _largest(config, "kv_lora_rank") or 0, _largest(config, "qk_rope_head_dim") or 0
    head_dim = (_largest(config, "qk_nope_head_dim") or 0) + rope if latent else _largest(config, "head_dim")
    dense = _largest(config, "intermediate_size", "ffn_hidden_size", "n_inner") or 4 * config.hidden_size
    matrices = {n: p for n, p in layers.named_parameters() if p.dim() > 1 and not n.endswith("bias")}
    experts = {n: p for n, p in matrices.items() if ".experts" in n or (p.dim() == 3 and p.shape[1] > 1)}
    every = _largest(config, *_EXPERTS) or 1
    active = min(every, _largest(config, *_ACTIVE) or every)
    all_matrices, all_experts = (sum(p.numel() for p in found.values()) for found in (matrices, experts))
    shape = BuiltShape(
        name=name, family=family, layers=len(layers), hidden=config.hidden_size, heads=heads,
        kv_heads=_largest(config, "num_key_value_heads", "num_kv_heads") or heads,
        head_dim=head_dim or config.hidden_size // heads,
        intermediate=dense, vocabulary=embedding.shape[0], tied=head is None or head.weight is embedding,
        positions=getattr(config, "max_position_embeddings", None),
        experts=every if experts else 0, active_experts=active if experts else 0,
        expert_intermediate=_largest(config, "moe_intermediate_size", "expert_ffn_hidden_size") or dense,
        expert_layers=len({n.split(".")[0] for n in experts}),
        parameters=_count(model), largest_layer=max(map(_count, layers)), outside=_count(model) - _count(layers),
        down_projection=max(p.numel() for p in matrices.values()),
        layer_matmul_per_token=all_matrices - all_experts + all_experts * active // every,
        head_norms=any(n.endswith(("q_norm", "k_norm")) for n, _ in layers.named_modules()),
        latent=latent + rope if latent else 0,
    )  # fmt: skip
    return _with_caches(shape, layers, config)


def _with_caches(shape: BuiltShape, layers: torch.nn.ModuleList, config: Any) -> BuiltShape:
    """Adds the attention blocks, their widths and windows, and the state of recurrent layers."""
    kinds = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None) or ()
    shared = _largest(config, "num_kv_shared_layers") or 0
    value_dim = _largest(config, "v_head_dim") or shape.head_dim
    widths, windows, state, recurrent = [], [], 0, False
    for index, layer in enumerate(layers):
        kind = kinds[index] if index < len(kinds) else ""
        modules = dict(layer.named_modules())
        convolutions = [m for m in modules.values() if isinstance(m, torch.nn.Conv1d)]
        if convolutions or kind in ("linear_attention", "mamba"):
            recurrent = True
            state += sum(m.weight.shape[0] * m.weight.shape[2] for m in convolutions)
            state += 0 if kind == "conv" else _recurrent_state(config)
        if kind in ("linear_attention", "mamba", "conv"):
            continue
        for block in (m for m in modules.values() if _PROJECTIONS & {n for n, _ in m.named_children()}):
            keys, values = (getattr(block, name, None) for name in ("k_proj", "v_proj"))
            if hasattr(block, "kv_b_proj"):
                width = shape.heads * (shape.head_dim + value_dim)
            elif keys is not None:
                width = keys.out_features + (keys if values is None else values).out_features
            else:
                width = 2 * shape.kv_width
            widths.append(0 if index >= len(layers) - shared else width)
            windows.append(_window(config, kind))
    if not widths and not recurrent:  # an attention that names its projections otherwise
        widths = [2 * shape.kv_width] * len(layers)
        windows = [_window(config, kind) for kind in kinds or [""] * len(layers)]
    estimated = (ESTIMATED, RECURRENT) if recurrent else (ESTIMATED,)
    return replace(
        shape, kv_widths=tuple(widths), layer_windows=tuple(windows), state=state, estimated=estimated
    )


def _window(config: Any, kind: str) -> int | None:
    """Tokens that a layer attends to at most; without layer_types the config's window holds for all."""
    if kind == "chunked_attention":
        return getattr(config, "attention_chunk_size", None)
    if kind in ("", "sliding_attention") and getattr(config, "use_sliding_window", True) is not False:
        return getattr(config, "sliding_window", None) or None
    return None


def _recurrent_state(config: Any) -> int:
    for keys in _STATES:
        if all(isinstance(getattr(config, key, None), int) for key in keys):
            return prod(getattr(config, key) for key in keys)
    return 0


def _count(module: torch.nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def _largest(config: Any, *keys: str) -> int | None:
    """The first of these keys that the config has; the largest value where it has one per layer."""
    for key in keys:
        value = getattr(config, key, None)
        if value:
            return max(value) if isinstance(value, (list, tuple)) else value
    return None
