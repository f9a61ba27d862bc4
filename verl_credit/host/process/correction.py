"""verl's rollout correction beside our pipeline: what its trainer reads of its keys, and what it does not."""

from __future__ import annotations

import torch
from omegaconf import DictConfig

from verl_credit.errors import ConfigError
from verl_credit.recipe.rules.correction import DEFAULTS, KEY


def check_correction(config: DictConfig) -> None:
    """What verl would refuse at its first step is refused here, in verl's words. Imports verl; raises ConfigError."""
    from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_rejection_mask

    given = config.algorithm.get("rollout_correction") or {}
    if given.get("bypass_mode", False) and not config.actor_rollout_ref.rollout.calculate_log_probs:
        log_probs = "actor_rollout_ref.rollout.calculate_log_probs"
        use = f"{KEY}.bypass_mode=true trains on the rollout engine's log-probs: set {log_probs}=true"
        raise ConfigError.of(config, log_probs, accepted=use)
    one_1_1 = torch.zeros(1, 1)
    try:
        compute_rollout_correction_and_rejection_mask(
            old_log_prob=one_1_1,
            rollout_log_prob=one_1_1,
            response_mask=one_1_1 + 1,
            **{name: given.get(name, value) for name, value in DEFAULTS.items() if name != "loss_type"},
        )
    except (ValueError, TypeError) as error:
        raise ConfigError(f"verl refuses {KEY}: {error}") from error
