"""Registers the rollout engine "hf" in verl."""


def register() -> None:
    """Register `rollout.name=hf` in verl; a second call changes nothing.

    Replica and adapter are imported only when used. verl has no function to register an adapter, so its private dict gets
    one entry.
    """
    from verl.workers.rollout.base import _ROLLOUT_REGISTRY
    from verl.workers.rollout.replica import RolloutReplicaRegistry

    RolloutReplicaRegistry.register("hf", _load_replica)
    _ROLLOUT_REGISTRY[("hf", "async")] = "verl_credit.host.hf_rollout.sync.ServerAdapter"


def _load_replica() -> type:
    from verl_credit.host.hf_rollout.replica import HFReplica

    return HFReplica
