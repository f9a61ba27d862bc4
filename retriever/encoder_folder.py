"""Reads an encoder's folder: each option of sentence-transformers' files is followed, refused or noted, and a folder that
lacks weights is refused."""

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModel

POOLINGS = ("mean", "cls")
# Older versions of sentence-transformers wrote these flags instead of one key "pooling_mode".
FLAGS = {"pooling_mode_mean_tokens": "mean", "pooling_mode_cls_token": "cls"}
UNUSED = "pooler."  # the classification head of BERT's family: sentence vectors are made without it
NAMED = 3
COMPUTE = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class EncoderSettings:
    """`pooling` and `normalize` of the folder's files, None where they set neither; `notes` are for the user."""

    pooling: str | None = None
    normalize: bool | None = None
    notes: tuple[str, ...] = ()

    def resolve(self, path: Path, pooling: str | None, normalize: bool) -> str:
        """The pooling in force: the argument, the folder's, or the mean. Errors: ValueError when the first two differ."""
        if pooling not in (None, *POOLINGS):
            raise ValueError(f"pooling={pooling!r}; accepted: {', '.join(POOLINGS)}")
        if None not in (pooling, self.pooling) and pooling != self.pooling:
            raise ValueError(
                f"pooling={pooling!r}; the encoder in {path} was trained with {self.pooling!r}, as its Pooling "
                "module says: leave it out, or take that module's files out of the folder"
            )
        if self.normalize and not normalize:
            raise ValueError(
                f"normalize=False; {path / 'modules.json'} lists Normalize: the encoder's vectors have length 1"
            )
        return pooling or self.pooling or "mean"


def read_settings(path: Path) -> EncoderSettings:
    """The settings of the folder `path`; all None for a folder without sentence-transformers' files.

    Errors: ValueError names file and value of a module, pooling or option that would give other vectors than ours.
    """
    modules, listed = path / "modules.json", {}
    if modules.is_file():
        listed = _modules(modules)
    pooling_file = path / (listed.get("Pooling") or "1_Pooling") / "config.json"
    if "Pooling" in listed and not pooling_file.is_file():
        raise ValueError(f"{modules}: lists Pooling, but {pooling_file} does not exist")
    return EncoderSettings(
        pooling=_pooling(pooling_file) if pooling_file.is_file() else None,
        normalize="Normalize" in listed if listed else None,
        notes=tuple(_notes(path, listed)),
    )


def _modules(file: Path) -> dict[str, str]:
    """Folder by kind of module."""
    found = {}
    for entry in _read(file, list):
        kind = str(entry.get("type")).rsplit(".", 1)[-1] if isinstance(entry, dict) else repr(entry)
        if kind not in ("Transformer", "Pooling", "Normalize") or kind in found:
            raise ValueError(
                f"{file}: module {kind!r}; only Transformer, Pooling and Normalize, once each, are understood"
            )
        found[kind] = str(entry.get("path") or "")
    if list(found)[:2] != ["Transformer", "Pooling"]:
        raise ValueError(
            f"{file}: modules {', '.join(found)}; expected Transformer, Pooling and maybe Normalize"
        )
    if found["Transformer"]:
        raise ValueError(
            f"{file}: Transformer is in {found['Transformer']!r}; expected it beside {file.name}"
        )
    return found


def _pooling(file: Path) -> str:
    config = _read(file, dict)
    flags = {key: value for key, value in config.items() if key.startswith("pooling_mode_")}
    modes = [FLAGS.get(key, key) for key, value in flags.items() if value]
    if not flags:
        modes = [config.get("pooling_mode", "mean")]
    if len(modes) != 1 or modes[0] not in POOLINGS:
        raise ValueError(f"{file}: pooling {modes}; accepted: one of {', '.join(POOLINGS)}")
    if config.get("include_prompt", True) is not True:
        raise ValueError(
            f"{file}: include_prompt={config['include_prompt']!r}; here the prefix is part of what is pooled"
        )
    return modes[0]


def _notes(path: Path, listed: dict):
    if listed and "Normalize" not in listed:
        yield f"{path / 'modules.json'} lists no Normalize; use --no-normalize for inner products of unnormalised vectors"
    options = path / "sentence_bert_config.json"
    if options.is_file():
        for key, value in _read(options, dict).items():
            if key == "max_seq_length" or (key == "do_lower_case" and value):
                yield f"{options}: {key}={value!r} is not followed; --max-length and the tokenizer decide"
    prompts_file = path / "config_sentence_transformers.json"
    if prompts_file.is_file() and (prompts := _read(prompts_file, dict).get("prompts")):
        yield f"{prompts_file}: prompts={prompts!r} are not followed; --query-prefix and --passage-prefix decide"


def _read(file: Path, kind: type):
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is not JSON ({error})") from None
    if not isinstance(found, kind):
        raise ValueError(f"{file}: {str(found)[:80]!r}; expected a JSON {kind.__name__}")
    return found


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
