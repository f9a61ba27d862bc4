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
    settings = {name: given.get(name, value) for name, value in DEFAULTS.items() if name != "loss_type"}
    one_1_1 = torch.zeros(1, 1)
    for off, kind in (("rollout_rs", "rollout_is"), ("rollout_is", "rollout_rs")):
        if settings[kind] is None:
            continue
        try:
            weights, kept_1_1, _ = compute_rollout_correction_and_rejection_mask(
                old_log_prob=one_1_1,
                rollout_log_prob=one_1_1,
                response_mask=one_1_1 + 1,
                **settings | {off: None},
            )
        except (ValueError, TypeError) as error:
            raise ConfigError(f"verl refuses {KEY}: {error}") from error
        except ArithmeticError:  # verl divides by the weights' sum, or by a bound
            weight = 0.0
        else:
            weight = kept_1_1.item() * (
                1.0 if weights is None else weights.batch["rollout_is_weights"].item()
            )
        if weight != 1:
            key = f"{KEY}.{kind}_threshold"
            raise ConfigError.of(config, key, f"{KEY}.{kind}", accepted=_unchanged(kind, weight))


def _unchanged(kind: str, weight: float) -> str:
    """What becomes of a token that both policies give the same probability."""
    lost = "be rejected" if kind == "rollout_rs" else f"weigh {weight:.3g}, and not 1"
    return (
        f"a token of unchanged probability would {lost}: 1 must lie within the bounds. Two bounds are written 0.5_5.0, "
        "each with a point: 0.5_5 is read as the number 0.55"
    )
