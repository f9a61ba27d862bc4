"""Enters the rollout engine "hf" into verl's registries."""


def register() -> None:
    """Make `rollout.name=hf` known to verl; a second call changes nothing.

    Replica and adapter are named here and imported only when used. verl's table of adapters has no function
    to add to it, so its private dict gets one entry.
    """
    from verl.workers.rollout.base import _ROLLOUT_REGISTRY
    from verl.workers.rollout.replica import RolloutReplicaRegistry

    RolloutReplicaRegistry.register("hf", _load_replica)
    _ROLLOUT_REGISTRY[("hf", "async")] = "verl_credit.host.hf_rollout.sync.ServerAdapter"


def _load_replica() -> type:
    from verl_credit.host.hf_rollout.replica import HFReplica

    return HFReplica
