"""Random weights in a published model's shape, made on the device and written as safetensors of at most 2 GiB."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedTokenizerFast

from gpu.models import TINY, config_of
from verl_credit.recipe.plan.model_shape import PUBLISHED, ModelShape

SHAPES = {"tiny": TINY} | {name: PUBLISHED[name] for name in ("qwen3-4b", "qwen3-1.7b")}
SHARD = 2 << 30
SPARE = 256 << 20
DTYPE = torch.bfloat16


def empty_model(shape: ModelShape) -> torch.nn.Module:
    """The model on the meta device: its names and shapes without memory."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config_of(shape), dtype=DTYPE)


def write_weights(
    shape: ModelShape, folder: Path, device: str, tokenizer: PreTrainedTokenizerFast, limit: int = SHARD
) -> None:
    """Writes the model folder, complete or not at all. RuntimeError: the weights do not fit the disk."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    need, free = DTYPE.itemsize * shape.parameters + SPARE, shutil.disk_usage(folder.parent).free
    if free < need:
        raise RuntimeError(
            f"{folder.parent} has {free / 2**30:.1f} GiB free; {shape.name}'s weights need {need / 2**30:.1f}"
        )
    work = folder.with_name(f".{folder.name}.part")
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir()
    model = empty_model(shape)
    config = model.config
    config.architectures, config.dtype = [type(model).__name__], DTYPE
    config.eos_token_id, config.pad_token_id = tokenizer.eos_token_id, tokenizer.pad_token_id
    config.save_pretrained(work)
    GenerationConfig(eos_token_id=config.eos_token_id, pad_token_id=config.pad_token_id).save_pretrained(work)
    tokenizer.save_pretrained(work)
    _save(model, work, device, limit)
    work.rename(folder)


def _save(model: torch.nn.Module, folder: Path, device: str, limit: int) -> None:
    shards: list[list[str]] = [[]]
    parameters, size = dict(model.named_parameters()), 0  # tied weights have one name here
    for name, parameter in parameters.items():
        if shards[-1] and size + parameter.nbytes > limit:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += parameter.nbytes
    generator, place = torch.Generator(device).manual_seed(0), {}
    for number, names in enumerate(shards, start=1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        save_file(
            {name: _random(name, parameters[name].shape, model.config, generator) for name in names},
            folder / file, metadata={"format": "pt"},
        )  # fmt: skip
        place |= dict.fromkeys(names, file)
    total = {"total_size": sum(parameter.nbytes for parameter in parameters.values())}
    index = json.dumps({"metadata": total, "weight_map": place}, indent=2)
    (folder / "model.safetensors.index.json").write_text(index)


def _random(name: str, shape: torch.Size, config, generator: torch.Generator) -> torch.Tensor:
    """A new model's weight: 1 in norms, 0 in biases, else normal with the config's standard deviation."""
    weight = torch.ones(shape, dtype=DTYPE, device=generator.device)
    if name.endswith("bias"):
        return weight.zero_()
    return weight if "norm" in name else weight.normal_(0, config.initializer_range, generator=generator)
