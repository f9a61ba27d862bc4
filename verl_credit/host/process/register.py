"""Everything the plugin registers with verl, once per process.

verl's ``verl.plugins`` entry point and ``actor_rollout_ref.model.external_lib`` both import
``verl_credit.host.external``, which calls ``register_all()``. verl swallows whatever goes wrong at the entry
point, so every process of ours calls it again itself, and the trainer asks every worker what it has
(``registered_names``).
"""

from __future__ import annotations


def register_all() -> None:
    """Idempotent. Raises ImportError loudly where verl or a dependency is missing.

    The platform comes first: verl reads it while its modules are imported.
    """
    from verl_credit.host.cpu.register import register as register_cpu
    from verl_credit.host.hf_rollout.register import register as register_hf

    register_cpu()
    register_hf()


def register_engines() -> None:
    """In processes that train: the engine for this device, and our attention in transformers."""
    from verl.utils.device import get_device_name

    from verl_credit.attention import install

    install()
    if get_device_name() == "cuda":
        from verl_credit.host.engine import gpu_engine  # noqa: F401  (the import registers the engine)


def registered_names() -> dict[str, bool]:
    """For every name of ours: is it in verl's registry in this process?"""
    from verl.experimental.agent_loop.agent_loop import _agent_loop_registry
    from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY, POLICY_LOSS_REGISTRY
    from verl.trainer.ppo.v1.trainer_base import TRAINER_REGISTRY

    from verl_credit import names as fields

    return {
        f"estimator {fields.ADV_ESTIMATOR}": fields.ADV_ESTIMATOR in ADV_ESTIMATOR_REGISTRY,
        f"loss {fields.LOSS_MODE}": fields.LOSS_MODE in POLICY_LOSS_REGISTRY,
        f"trainer {fields.TRAINER_MODE}": fields.TRAINER_MODE in TRAINER_REGISTRY,
        f"agent loop {fields.AGENT_NAME}": fields.AGENT_NAME in _agent_loop_registry,
    }


def require_registered(where: str, names: dict[str, bool]) -> None:
    """Raise RuntimeError naming the process and what it lacks."""
    missing = [name for name, present in names.items() if present is False]
    if missing:
        raise RuntimeError(
            f"the verl_credit plugin is not registered in {where}: missing {missing}. "
            "Is verl_credit installed in that process's environment?"
        )
