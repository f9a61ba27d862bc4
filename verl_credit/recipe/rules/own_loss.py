"""A policy loss that a module of the user's registers with verl (``register_policy_loss``).

`train` looks into verl's registry, before Ray, once these modules are imported (`host.process.verl_checks`). Without
verl the names of verl 0.9.1 are known, and whether a recipe names modules.
"""

from __future__ import annotations

import os

from verl_credit.config.keys import LOSS
from verl_credit.config.keys.loss import TARGET
from verl_credit.config.keys.verl import VERLS_LOSSES
from verl_credit.config.resolved import Config, Tree, select
from verl_credit.config.settings import CreditSettings
from verl_credit.errors import ConfigError
from verl_credit.names import LOSS_MODE

MODULES, IN_ENVIRONMENT = "actor_rollout_ref.model.external_lib", "VERL_USE_EXTERNAL_MODULES"
OURS = "verl_credit.host.external"  # older recipes name it there; it registers no loss


def own_loss(config: Config) -> str | None:
    """The name of a loss that is neither verl's nor ours."""
    name = select(config, f"{LOSS}.loss_mode")
    return None if name in (LOSS_MODE, *VERLS_LOSSES) else name


def own_modules(config: Config) -> list[str]:
    """What verl imports in the processes of a run that read the model's config, and what it imports in all."""
    named = select(config, MODULES) or []
    named = [named] if isinstance(named, str) else list(named)
    named += os.environ.get(IN_ENVIRONMENT, "").split(",")
    return [module for module in named if module not in ("", OURS)]


def validate_loss(config: Tree, settings: CreditSettings) -> None:
    """Raise ConfigError for a loss that nobody can have registered, or that cannot do what another key asks for."""
    loss, name, key = select(config, LOSS), own_loss(config), f"{LOSS}._target_"
    if (given := loss.get("_target_")) != TARGET:
        raise ConfigError(key=key, value=given, accepted=f"it has to take our keys beside it; use {TARGET}")
    if loss.loss_mode != LOSS_MODE and select(config, f"{LOSS}.dynamic_clip") is True:
        use = f"only {LOSS_MODE} reads a turn's clip scale, {loss.loss_mode} would clip every turn alike; set it to false, "
        use += f"or loss_mode to {LOSS_MODE}"
        raise ConfigError.of(config, f"{LOSS}.dynamic_clip", f"{LOSS}.loss_mode", accepted=use)
    if loss.loss_mode == "dro" and not loss.get("dro_beta"):
        use = "that loss needs its quadratic penalty: a number above 0"
        raise ConfigError.of(config, f"{LOSS}.dro_beta", f"{LOSS}.loss_mode", accepted=use)
    if name is not None and not own_modules(config):
        known = [LOSS_MODE, *VERLS_LOSSES]
        error = ConfigError(key=f"{LOSS}.loss_mode", value=name, accepted=known)
        said = f"{error}, or a loss of yours that a module in {MODULES} registers with verl (docs/plugins.md)"
        raise ConfigError(said, key=error.key, value=name, accepted=known)
