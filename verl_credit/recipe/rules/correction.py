"""verl's rollout correction beside our pipeline: keys that are set and change nothing."""

from __future__ import annotations

from collections.abc import Mapping

from omegaconf import DictConfig

KEY = "algorithm.rollout_correction"


DEFAULTS = {
    "rollout_is": None,
    "rollout_is_threshold": 2.0,
    "rollout_is_batch_normalize": False,
    "rollout_rs": None,
    "rollout_rs_threshold": None,
    "loss_type": "ppo_clip",
}


def correction_without_effect(config: DictConfig) -> list[str]:
    """Keys that are set and change nothing, with the reason."""
    given = config.algorithm.get("rollout_correction") or {}
    changed = {name: given[name] for name, value in DEFAULTS.items() if given.get(name, value) != value}
    if not changed:
        return []
    if given.get("bypass_mode", False):
        return [
            f"{_said(changed)}: with {KEY}.bypass_mode=true verl's v1 trainer weighs no token and rejects none; set "
            "bypass_mode=false"
        ]
    if not config.actor_rollout_ref.rollout.calculate_log_probs:
        return [
            f"{_said(changed)}: there is nothing to correct by without the rollout engine's log-probs; set "
            "actor_rollout_ref.rollout.calculate_log_probs=true"
        ]
    # Of the loss that bypass_mode has in verl's older trainer.
    idle = changed.keys() & {"loss_type"}
    if given.get("rollout_is") is None:
        idle |= changed.keys() & {"rollout_is_threshold", "rollout_is_batch_normalize"}
    if given.get("rollout_rs") is None:
        idle |= changed.keys() & {"rollout_rs_threshold"}
    left = {name: value for name, value in changed.items() if name in idle}
    return [f"{_said(left)}: what would read it is off"] if left else []


def _said(values: Mapping) -> str:
    return ", ".join(f"{KEY}.{name}={value}" for name, value in values.items())
