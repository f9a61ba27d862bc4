"""The policy's folder or hub name holds a model, which has a position for every token of a row."""

from __future__ import annotations

from pathlib import Path

from omegaconf import DictConfig

from verl_credit.doctor.inputs.hub import HubError, refuse_absent
from verl_credit.doctor.inputs.model_files import model_values
from verl_credit.errors import PreflightError


def require_model(path: str | None) -> None:
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


def require_positions(config: DictConfig) -> None:
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
