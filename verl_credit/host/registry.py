"""What this process has in verl's registries, and what a worker of ours enters there itself."""

from __future__ import annotations

from verl_credit import names
from verl_credit.host.cpu.register import register as register_cpu
from verl_credit.host.hf_rollout.register import register as register_hf


def register_parts() -> None:
    """The platform and the rollout engine; idempotent. The platform comes first: verl reads it while it is imported."""
    register_cpu()
    register_hf()


def register_engines() -> None:
    """In processes that train: the engine for this device, and our attention in transformers."""
    from verl.utils.device import get_device_name

    from verl_credit.policy.attention import install

    install()
    if get_device_name() == "cuda":
        from verl_credit.host.engine import gpu_engine  # noqa: F401  (the import registers the engine)


LOSS = f"loss {names.LOSS_MODE}"
AGENT_LOOP, TURN_LOOP = (f"agent loop {name}" for name in names.AGENTS)
ESTIMATOR = f"estimator {names.ADV_ESTIMATOR}"
TRAINERS = {mode: f"trainer {mode}" for mode in names.TRAINING_MODES}
ALL = (ESTIMATOR, LOSS, *TRAINERS.values(), AGENT_LOOP, TURN_LOOP)


def registered_names() -> dict[str, bool]:
    """For every name of ours: is it in verl's registry in this process?"""
    from verl.experimental.agent_loop.agent_loop import _agent_loop_registry
    from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY, POLICY_LOSS_REGISTRY
    from verl.trainer.ppo.v1.trainer_base import TRAINER_REGISTRY

    return {
        ESTIMATOR: names.ADV_ESTIMATOR in ADV_ESTIMATOR_REGISTRY,
        LOSS: names.LOSS_MODE in POLICY_LOSS_REGISTRY,
        **{name: mode in TRAINER_REGISTRY for mode, name in TRAINERS.items()},
        AGENT_LOOP: names.AGENT_NAME in _agent_loop_registry,
        TURN_LOOP: names.TURN_AGENT in _agent_loop_registry,
    }


def require_registered(where: str, found: dict[str, bool], *needed: str) -> None:
    """Raise RuntimeError naming the process and what it lacks of ``needed`` (without any: of all)."""
    missing = [name for name in needed or ALL if not found[name]]
    if missing:
        raise RuntimeError(
            f"the verl_credit plugin is not registered in {where}: missing {missing}. "
            "Is verl_credit installed in that process's environment?"
        )
