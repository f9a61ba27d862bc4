"""Lists our names in verl's registries of this process, and registers the names that a worker needs."""

from __future__ import annotations

from verl_credit import names


def register_parts() -> None:
    """Register the CPU platform (first, because verl reads it while it is imported), the rollout engine `hf`, and our sender
    of weights to vLLM. verl has no function to register an adapter, therefore its private dict gets two entries."""
    from verl_credit.host.cpu import platform  # noqa: F401, I001  (the import registers it)
    from verl.workers.rollout.base import _ROLLOUT_REGISTRY
    from verl.workers.rollout.replica import RolloutReplicaRegistry

    def load_replica() -> type:
        from verl_credit.host.hf_rollout.replica import HFReplica

        return HFReplica

    RolloutReplicaRegistry.register(names.ROLLOUT_NAME, load_replica)
    _ROLLOUT_REGISTRY[(names.ROLLOUT_NAME, "async")] = "verl_credit.host.hf_rollout.sync.ServerAdapter"
    _ROLLOUT_REGISTRY[("vllm", "async")] = "verl_credit.host.vllm_rollout.sync.ServerAdapter"


def register_engines() -> None:
    """Register our engines in verl, and our attention in transformers; called by processes that train."""
    from verl_credit.host.engine import fsdp, value_engine  # noqa: F401  (the import registers them)
    from verl_credit.policy.attention.implementation import install

    install()


LOSS = f"loss {names.LOSS_MODE}"
LOOPS = {name: f"agent loop {name}" for name in names.AGENTS}
ESTIMATOR = f"estimator {names.ADV_ESTIMATOR}"
TRAINERS = {mode: f"trainer {mode}" for mode in names.TRAINING_MODES}
ALL = (ESTIMATOR, LOSS, *TRAINERS.values(), *LOOPS.values())


def registered_names() -> dict[str, bool]:
    """Returns, for each of our names, whether verl's registry in this process has it."""
    from verl.experimental.agent_loop.agent_loop import _agent_loop_registry
    from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY, POLICY_LOSS_REGISTRY
    from verl.trainer.ppo.v1.trainer_base import TRAINER_REGISTRY

    return {
        ESTIMATOR: names.ADV_ESTIMATOR in ADV_ESTIMATOR_REGISTRY,
        LOSS: names.LOSS_MODE in POLICY_LOSS_REGISTRY,
        **{name: mode in TRAINER_REGISTRY for mode, name in TRAINERS.items()},
        **{loop: name in _agent_loop_registry for name, loop in LOOPS.items()},
    }


def require_registered(where: str, registered: dict[str, bool], *needed: str) -> None:
    """Raise RuntimeError naming the process and the names that it lacks of ``needed`` (by default of all)."""
    missing = [name for name in needed or ALL if not registered[name]]
    if missing:
        asks = "Is verl_credit installed in that process's environment?"
        raise RuntimeError(f"the verl_credit plugin is not registered in {where}: missing {missing}. {asks}")
