"""What must be true before Ray starts: names known to verl, data readable, model there, server up."""

from __future__ import annotations

from omegaconf import DictConfig

from verl_credit.errors import ConfigError


def check_names(config: DictConfig) -> None:
    """Estimator, loss, agent loop, tool format and engine must be in verl's registries (imports verl)."""
    from verl.experimental.agent_loop.agent_loop import _agent_loop_registry
    from verl.experimental.agent_loop.tool_parser import ToolParser
    from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY, POLICY_LOSS_REGISTRY, AdvantageEstimator
    from verl.workers.rollout.base import _ROLLOUT_REGISTRY

    estimators = {str(getattr(n, "value", n)) for n in ADV_ESTIMATOR_REGISTRY} | {
        e.value for e in AdvantageEstimator
    }
    rollout = config.actor_rollout_ref.rollout
    loss = config.actor_rollout_ref.actor.policy_loss.loss_mode
    _known("algorithm.adv_estimator", config.algorithm.adv_estimator, estimators)
    _known("actor_rollout_ref.actor.policy_loss.loss_mode", loss, set(POLICY_LOSS_REGISTRY))
    _known("actor_rollout_ref.rollout.name", rollout.name, {name for name, _ in _ROLLOUT_REGISTRY})
    _known(
        "actor_rollout_ref.rollout.multi_turn.format", rollout.multi_turn.format, set(ToolParser._registry)
    )
    default = rollout.agent.default_agent_loop
    _known("actor_rollout_ref.rollout.agent.default_agent_loop", default, set(_agent_loop_registry))


def _known(key: str, value: str, accepted: set[str]) -> None:
    if value not in accepted:
        raise ConfigError(key=key, value=value, accepted=sorted(accepted), shown=repr(value))
