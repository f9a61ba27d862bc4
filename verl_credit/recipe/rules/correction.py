"""Checks verl's rollout correction beside our pipeline: keys without effect, and values that are mistakes."""

from __future__ import annotations

from collections.abc import Mapping

from verl_credit.config.keys import LOSS
from verl_credit.config.resolved import Config, Tree, select
from verl_credit.config.settings import CreditSettings
from verl_credit.errors import ConfigError
from verl_credit.names import ASYNC_MODES
from verl_credit.recipe.auto import MODE

KEY = "algorithm.rollout_correction"
BYPASS = "bypass_mode"
"""The name of verl's switch and of the loss that belongs to it."""

DEFAULTS = {
    "rollout_is": None,
    "rollout_is_threshold": 2.0,
    "rollout_is_batch_normalize": False,
    "rollout_rs": None,
    "rollout_rs_threshold": None,
    "loss_type": "ppo_clip",
}


def validate_correction(config: Tree, settings: CreditSettings) -> None:
    """Raises ConfigError for mistakes that verl accepts; `host.process.verl_checks` finds what verl itself refuses."""
    if select(config, f"{LOSS}.loss_mode") == BYPASS and not compares_with_the_writer(config):
        use = (
            "that loss takes old_log_probs for the rollout engine's, and they are the trainer's; set "
            f"{KEY}.{BYPASS}=true"
        )
        raise ConfigError.of(config, f"{LOSS}.loss_mode", MODE, f"{KEY}.{BYPASS}", accepted=use)


def compares_with_the_writer(config: Config) -> bool:
    """Does the loss compare a token with the engine's weights that wrote it?

    It does in the asynchronous trainers, unless the correction weighs or rejects tokens by the engine's difference.
    """
    given = config.algorithm.get("rollout_correction") or {}
    if given.get(BYPASS, False):
        return True
    corrected = given.get("rollout_is") is not None or given.get("rollout_rs") is not None
    return select(config, MODE) in ASYNC_MODES and not corrected


def correction_without_effect(config: Config) -> list[str]:
    """Returns the keys that are set and change nothing, with the reason."""
    given = config.algorithm.get("rollout_correction") or {}
    changed = {name: given[name] for name, value in DEFAULTS.items() if given.get(name, value) != value}
    if not changed:
        return []
    if given.get("bypass_mode", False):
        return [
            f"{_assignments(changed)}: with {KEY}.bypass_mode=true verl's v1 trainer weighs no token and rejects none; set "
            "bypass_mode=false"
        ]
    if not config.actor_rollout_ref.rollout.calculate_log_probs:
        return [
            f"{_assignments(changed)}: there is nothing to correct by without the rollout engine's log-probs; set "
            "actor_rollout_ref.rollout.calculate_log_probs=true"
        ]
    # Only the loss of bypass_mode in verl's older trainer reads these.
    idle = changed.keys() & {"loss_type"}
    if given.get("rollout_is") is None:
        idle |= changed.keys() & {"rollout_is_threshold", "rollout_is_batch_normalize"}
    if given.get("rollout_rs") is None:
        idle |= changed.keys() & {"rollout_rs_threshold"}
    left = {name: value for name, value in changed.items() if name in idle}
    return [f"{_assignments(left)}: what would read it is off"] if left else []


def _assignments(values: Mapping) -> str:
    return ", ".join(f"{KEY}.{name}={value}" for name, value in values.items())
