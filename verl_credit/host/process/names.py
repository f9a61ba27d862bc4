"""What must be true before Ray starts: names known to verl, data readable, model there, server up."""

from __future__ import annotations

from collections.abc import Iterable
from importlib import import_module

from omegaconf import DictConfig

from verl_credit.config.fit import DEFAULT
from verl_credit.errors import ConfigError
from verl_credit.recipe.agent_loops import own_loops
from verl_credit.recipe.rules.own_loss import MODULES


def check_names(config: DictConfig) -> None:
    """Estimator, loss, agent loop and tool format must be in verl's registries, once the modules are imported that the
    recipe names (imports verl). Which engines there are is a rule of recipes (`recipe.rules.engines`)."""
    from verl.experimental.agent_loop.agent_loop import _agent_loop_registry
    from verl.experimental.agent_loop.tool_parser import ToolParser
    from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY, POLICY_LOSS_REGISTRY, AdvantageEstimator

    _import_modules(config.actor_rollout_ref.model.external_lib)
    estimators = {str(getattr(n, "value", n)) for n in ADV_ESTIMATOR_REGISTRY} | {
        e.value for e in AdvantageEstimator
    }
    rollout = config.actor_rollout_ref.rollout
    loss = config.actor_rollout_ref.actor.policy_loss.loss_mode
    _known("algorithm.adv_estimator", config.algorithm.adv_estimator, estimators)
    _known("actor_rollout_ref.actor.policy_loss.loss_mode", loss, set(POLICY_LOSS_REGISTRY))
    _known(
        "actor_rollout_ref.rollout.multi_turn.format", rollout.multi_turn.format, set(ToolParser._registry)
    )
    # verl's own loops write no turn ids
    loops = {name for name, made in _agent_loop_registry.items() if not made["_target_"].startswith("verl.")}
    _known(DEFAULT, rollout.agent.default_agent_loop, loops | {*own_loops(config)})


def _import_modules(named: str | Iterable[str] | None) -> None:
    """As verl does in every worker."""
    for module in [named] if isinstance(named, str) else named or []:
        try:
            import_module(module)
        except Exception as error:  # a user's module raises what it likes
            said = " ".join(f"{type(error).__name__}: {error}".split())
            raise ConfigError(key=MODULES, value=module, accepted=f"it cannot be imported: {said}") from error


def _known(key: str, value: str, accepted: set[str]) -> None:
    if value not in accepted:
        raise ConfigError(key=key, value=value, accepted=sorted(accepted), shown=repr(value))
