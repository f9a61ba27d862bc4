"""What the files of a model say: its config.json, the headers of its weights, its tokenizer."""

from __future__ import annotations

import json
from math import prod
from pathlib import Path

from verl_credit.doctor.inputs.hub import cached_config
from verl_credit.errors import ConfigError, PreflightError
from verl_credit.plan.model_shape import shape_of

HEADER_LIMIT = 100_000_000  # bytes; safetensors' own limit
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")


class Unreadable(ValueError):
    """Names the file and what is wrong with it."""


def read_model(folder: Path) -> str:
    """One line about a model that can be read. Raises Unreadable."""
    config = read_json(folder / "config.json")
    parameters = count_parameters(folder)
    tokenizer = next((folder / n for n in TOKENIZERS if (folder / n).is_file()), None)
    if tokenizer is None:
        raise Unreadable(f"{folder}: no tokenizer; expected one of {', '.join(TOKENIZERS)}")
    if tokenizer.name == "tokenizer.json":
        from tokenizers import Tokenizer

        try:
            words = Tokenizer.from_file(str(tokenizer)).get_vocab_size()
        except Exception as error:  # the library raises plain Exception
            raise Unreadable(f"{tokenizer}: not a tokenizer ({error})") from error
        vocabulary = config.get("vocab_size") or (config.get("text_config") or {}).get("vocab_size")
        if isinstance(vocabulary, int) and words > vocabulary:
            raise Unreadable(f"{tokenizer}: {words} tokens, and config.json has vocab_size={vocabulary}")
    kind = config.get("model_type", "?")
    return f"{kind}, {parameters:,} parameters"


def count_parameters(folder: Path) -> int:
    """From the headers of the safetensors files, which are checked against the files' sizes. Raises Unreadable."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        names = sorted(set(read_json(index).get("weight_map", {}).values()))
    else:
        names = [path.name for path in sorted(folder.glob("*.safetensors"))]
    if not names:
        raise Unreadable(f"{folder}: no *.safetensors; expected the model's weights")
    return sum(_tensor_elements(folder / name) for name in names)


def _tensor_elements(path: Path) -> int:
    try:
        total = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if not 2 <= length <= min(HEADER_LIMIT, total - 8):
                raise Unreadable(f"{path}: its header would have {length} bytes, the file has {total}")
            header = json.loads(file.read(length))
        tensors = [entry for key, entry in header.items() if key != "__metadata__"]
        needed = 8 + length + max((entry["data_offsets"][1] for entry in tensors), default=0)
    except OSError as error:
        raise Unreadable(f"{path}: {error.strerror or error}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, Unreadable):
            raise
        raise Unreadable(f"{path}: not a safetensors file ({error!r})") from error
    if total != needed:
        raise Unreadable(f"{path}: {total} bytes, and its header describes {needed}")
    return sum(prod(entry["shape"]) for entry in tensors)


def read_json(path: Path) -> dict:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise Unreadable(f"{path}: {error.strerror or error}") from error
    except ValueError as error:
        raise Unreadable(f"{path} is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise Unreadable(f"{path} holds {type(found).__name__}; expected an object")
    return found


def parameters_of(path: str | None) -> int | None:
    """Of the model: counted in its files, else by its name or its config.json in the hub's cache; None: unknown."""
    if not path or not isinstance(path, str):
        return None
    for folder in (Path(path).expanduser(), _cached_folder(path)):
        try:
            if folder is not None and folder.is_dir():
                return count_parameters(folder)
        except Unreadable:
            continue
    for model in (path, _cached_folder(path)):
        try:
            return shape_of(model).parameters if model else None
        except ConfigError:
            continue
    return None


def _cached_folder(path: str) -> Path | None:
    found = cached_config(path)
    return Path(found).parent if found else None


def model_values(path: str) -> dict | None:
    """The model's config.json, from its folder or the hub's cache; None where neither has it. Raises PreflightError."""
    file = Path(path).expanduser() / "config.json"
    found = str(file) if file.exists() else cached_config(path)
    try:
        return None if found is None else json.loads(Path(found).read_text(encoding="utf-8"))
    except ValueError as error:
        raise PreflightError(f"actor_rollout_ref.model.path={path}: {found} is not JSON ({error})") from error
