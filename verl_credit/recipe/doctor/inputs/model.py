"""Checks the policy's model, a folder or a hub name, by its files."""

from __future__ import annotations

import json
from contextlib import suppress
from math import prod
from pathlib import Path

from omegaconf import DictConfig
from safetensors import SafetensorError, safe_open

from verl_credit.errors import ConfigError, PreflightError
from verl_credit.recipe.doctor.inputs.hub import HubError, cached_config, refuse_absent
from verl_credit.recipe.plan.model_shape import shape_of

TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")


class Unreadable(PreflightError):
    """A file of the model cannot be read; the message names the file and the fault."""


def read_model(folder: Path) -> str:
    """Returns a line that describes the model. Raises Unreadable."""
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
    """Reads the headers of the safetensors files. Raises Unreadable."""
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
        with safe_open(path, "pt") as file:  # safe_open compares the header with the file's size
            return sum(prod(file.get_slice(key).get_shape()) for key in file.keys())  # noqa: SIM118
    except OSError as error:
        raise Unreadable(f"{path}: {error.strerror or error}") from error
    except SafetensorError as error:
        raise Unreadable(f"{path}: not a whole safetensors file ({error})") from error


def read_json(path: Path) -> dict:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise Unreadable(f"{path}: {error.strerror or error}") from error
    except ValueError as error:
        raise Unreadable(f"{path} is not JSON: {error}") from error
    if not isinstance(values, dict):
        raise Unreadable(f"{path} holds {type(values).__name__}; expected an object")
    return values


def parameters_of(path: str | None) -> int | None:
    """The number of the model's parameters, from its files, its name or its config.json in the hub's cache, if known."""
    if not path or not isinstance(path, str):
        return None
    config_file = cached_config(path)
    cached = Path(config_file).parent if config_file else None
    for folder in (Path(path).expanduser(), cached):
        with suppress(Unreadable):
            if folder is not None and folder.is_dir():
                return count_parameters(folder)
    for model in (path, cached):
        with suppress(ConfigError):
            return shape_of(model).parameters if model else None
    return None


def model_values(path: str) -> dict | None:
    """The model's config.json, from its folder or the hub's cache; None where neither has it. Raises PreflightError."""
    file = Path(path).expanduser() / "config.json"
    config_file = str(file) if file.exists() else cached_config(path)
    try:
        return None if config_file is None else read_json(Path(config_file))
    except Unreadable as error:
        raise PreflightError(f"actor_rollout_ref.model.path={path}: {error}") from error


def require_model(path: str | None) -> None:
    """Checks that a local path holds a model, or that the hub or its cache has the name."""
    if not path or not isinstance(path, str):
        raise PreflightError(f"actor_rollout_ref.model.path={path}: give a model folder or a hub name")
    folder = Path(path).expanduser()
    looks_local = path.startswith(("/", ".", "~")) or folder.exists()
    if looks_local and not (folder / "config.json").exists():
        raise PreflightError(
            f"actor_rollout_ref.model.path={path}: no config.json there; expected a model folder"
        )
    if looks_local or "://" in path:  # verl fetches hdfs:// itself
        return
    try:
        refuse_absent(path)
    except HubError as error:
        raise PreflightError(f"actor_rollout_ref.model.path={path}: {error}") from error


def require_positions(config: DictConfig) -> str:
    """Checks that the model has a position for every token of the longest sequence, where its config is known."""
    model, rollout = config.actor_rollout_ref.model, config.actor_rollout_ref.rollout
    row = config.data.max_prompt_length + config.data.max_response_length
    length = rollout.max_model_len or row
    values = model_values(model.path) or {}
    positions = values.get("max_position_embeddings") or (values.get("text_config") or {}).get(
        "max_position_embeddings"
    )
    if positions is not None and length > positions:
        raise PreflightError(
            f"actor_rollout_ref.rollout.max_model_len={rollout.max_model_len}, data.max_prompt_length + "
            f"data.max_response_length = {row}: {model.path} has {positions} positions (max_position_embeddings of its "
            f"config.json); shorten the rows to {positions - (length - row)} tokens, or take another model"
        )
    return f"{length} tokens at most, {positions or 'an unknown number of'} positions"
