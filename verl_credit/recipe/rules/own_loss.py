"""Checks a policy loss that a user's module registers with verl (``register_policy_loss``).

`train` imports these modules before Ray and looks into verl's registry (`host.process.verl_checks`). Without verl, only
the names of verl 0.9.1 and the recipe's modules are known.
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
OURS = "verl_credit.host.external"  # older recipes list this module, which registers no loss


def own_loss(config: Config) -> str | None:
    """The name of a user's loss; None for a loss of verl's or ours."""
    name = select(config, f"{LOSS}.loss_mode")
    return None if name in (LOSS_MODE, *VERLS_LOSSES) else name


def own_modules(config: Config) -> list[str]:
    """The modules that verl imports in all processes of a run, or in the processes that read the model's config."""
    modules = select(config, MODULES) or []
    modules = [modules] if isinstance(modules, str) else list(modules)
    modules += os.environ.get(IN_ENVIRONMENT, "").split(",")
    return [module for module in modules if module not in ("", OURS)]


def validate_loss(config: Tree, settings: CreditSettings) -> None:
    """Raises ConfigError for a loss that no module registers, or that does not support the setting of another key."""
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
        message = (
            f"{error}, or a loss of yours that a module in {MODULES} registers with verl (docs/plugins.md)"
        )
        raise ConfigError(message, key=error.key, value=name, accepted=known)
