"""Loads an encoder's weights, and refuses a folder that lacks some of them."""

from pathlib import Path

import torch
from transformers import AutoModel

UNUSED = "pooler."  # the classification head of BERT's family: sentence vectors are made without it
NAMED = 3
COMPUTE = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def device_for(name: str, dtype: str) -> torch.device:
    """The torch device `name`. Errors: ValueError when it is not here, or does not compute in `dtype` of `COMPUTE`."""
    if dtype not in COMPUTE:
        raise ValueError(f"encode dtype={dtype!r}; accepted: {', '.join(COMPUTE)}")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ValueError(f"device={name!r}; expected cpu, cuda, cuda:1 or another that torch knows") from None
    if device.type == "cpu" and dtype == "fp16":
        raise ValueError(
            f"encode dtype=fp16 on device={name!r}; a CPU computes in fp32 or bf16, a GPU in all"
        )
    if device.type == "cuda":
        if (device.index or 0) >= (here := torch.cuda.device_count()):
            raise ValueError(f"device={name!r}; torch {torch.__version__} sees {here} GPUs")
        major, minor = torch.cuda.get_device_capability(device)
        if dtype == "bf16" and major < 8:
            raise ValueError(
                f"encode dtype=bf16 on device={name!r}: its compute capability is {major}.{minor}, bf16 "
                "needs 8.0; use fp16"
            )
    return device


def load_model(path: Path) -> torch.nn.Module:
    """The float32 model in `path`, from `*.safetensors` alone.

    Errors: ValueError names tensors that the files lack or hold in another shape. transformers would fill them with
    random numbers, and every start of the server would give other answers.
    """
    model, report = AutoModel.from_pretrained(
        str(path),
        use_safetensors=True,
        local_files_only=True,
        trust_remote_code=False,
        dtype=torch.float32,
        output_loading_info=True,
        ignore_mismatched_sizes=True,  # refused below, with both shapes
    )
    mismatched = {
        key: f"{key} {list(found)}, not {list(right)}" for key, found, right in report["mismatched_keys"]
    }
    missing = [key for key in report["missing_keys"] if key not in mismatched]
    _refuse(path, "miss", missing, report["unexpected_keys"])
    _refuse(path, "hold in another shape", mismatched.values(), ())
    if report.get("error_msgs"):
        raise ValueError(f"encoder={str(path)!r}: {report['error_msgs'][0]}")
    return model


def _refuse(path: Path, what: str, keys, instead) -> None:
    bad = sorted(key for key in keys if not key.startswith(UNUSED))
    if not bad:
        return
    extra = f" They hold instead: {_some(sorted(instead))}." if instead else ""
    raise ValueError(
        f"encoder={str(path)!r}: its *.safetensors {what} {len(bad)} tensors of config.json's model: {_some(bad)}."
        f"{extra} Save the encoder itself with save_pretrained, not a wrapper around it"
    )


def _some(keys: list[str]) -> str:
    return ", ".join(keys[:NAMED]) + (f" and {len(keys) - NAMED} more" if len(keys) > NAMED else "")
