"""The turn-level PPO loss inside verl's own ``ppo_loss``, which keeps the KL, entropy and correction terms.

verl's ``ppo_loss`` passes only log-probs, advantages and the mask to a registered policy loss. The worker calls
``credit_ppo_loss`` instead: it stores the missing per-token fields in a context variable for the registered loss, and calls
``ppo_loss``.
"""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass

from tensordict import TensorDict
from verl.trainer.ppo.core_algos import register_policy_loss
from verl.workers.config.actor import PolicyLossConfig
from verl.workers.utils.losses import ppo_loss

from verl_credit.credit import turn_policy_loss
from verl_credit.names import CLIP_SCALE, LOSS_MODE, TURN_IDS


@dataclass
class TurnPolicyLossConfig(PolicyLossConfig):
    """``actor.policy_loss`` with our keys; chosen by ``_target_``."""

    ratio_level: str = "turn"
    """Level of the importance ratio: token, turn or sequence."""
    dynamic_clip: bool = True
    """Scale each turn's clip range by its information gain."""
    clip_beta: float = 0.3
    """Largest relative change of the clip range; read when the advantages are computed."""


_FIELDS: ContextVar[TensorDict | None] = ContextVar("verl_credit_turn_fields", default=None)


def credit_ppo_loss(config, model_output, data, dp_group=None):
    """``ppo_loss`` with turn ids and clip scales, which the trainer has written for every row."""
    token = _FIELDS.set(data.select(TURN_IDS, CLIP_SCALE).to_padded_tensor())
    try:
        return ppo_loss(config=config, model_output=model_output, data=data, dp_group=dp_group)
    finally:
        _FIELDS.reset(token)


@register_policy_loss(LOSS_MODE)
def turn_ppo(
    old_log_prob,
    log_prob,
    advantages,
    response_mask,
    loss_agg_mode="token-mean",
    config=None,
    rollout_is_weights=None,
):
    """verl's policy-loss signature; equation, shapes and sources: ``verl_credit.credit.turn_policy_loss``.

    At token level verl's dual clip (``clip_ratio_c``) is kept, so that the loss equals verl's vanilla loss; the released
    turn-level loss has none.
    """
    fields = _FIELDS.get()
    if fields is None:
        raise RuntimeError(
            f"policy loss {LOSS_MODE!r} was called without turn ids: only the worker of trainer mode 'credit' "
            "provides them (set trainer.v1.trainer_mode=credit)"
        )
    settings, bounds = config.policy_loss, (config.clip_ratio_low, config.clip_ratio_high)
    low, high = (config.clip_ratio if bound is None else bound for bound in bounds)
    loss, metrics = turn_policy_loss(
        log_prob,
        old_log_prob,
        advantages,
        response_mask,
        fields[TURN_IDS],
        clip_ratio_low=low,
        clip_ratio_high=high,
        clip_scale_B_T=fields[CLIP_SCALE] if settings.dynamic_clip else None,
        ratio_level=settings.ratio_level,
        loss_agg_mode=loss_agg_mode,
        rollout_is_weights=rollout_is_weights,
        clip_ratio_c=config.clip_ratio_c if settings.ratio_level == "token" else None,
        **config.global_batch_info,
    )
    return loss, {f"actor/{name}": value for name, value in metrics.items()}
