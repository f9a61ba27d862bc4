"""The policy's folder or hub name holds a model."""

from __future__ import annotations

import json
from pathlib import Path

from omegaconf import DictConfig

from verl_credit.doctor.inputs.hub import HubError, cached_config, refuse_absent
from verl_credit.errors import PreflightError


def check_model(path: str | None) -> None:
    """A local path must hold a model; a name must be one that the hub has, or its cache."""
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


def model_values(path: str) -> dict | None:
    """The model's config.json, from its folder or the hub's cache; None where neither has it. Raises PreflightError."""
    file = Path(path).expanduser() / "config.json"
    found = str(file) if file.exists() else cached_config(path)
    try:
        return None if found is None else json.loads(Path(found).read_text(encoding="utf-8"))
    except ValueError as error:
        raise PreflightError(f"actor_rollout_ref.model.path={path}: {found} is not JSON ({error})") from error


def check_positions(config: DictConfig) -> None:
    """The model has a position for every token of the longest sequence; one whose config is not here is not asked."""
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
