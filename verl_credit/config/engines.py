"""The rollout engines: what each needs, fits and lacks, so that rules, plan, doctor and adopt know no engine's name."""

from __future__ import annotations

from dataclasses import dataclass

from omegaconf import DictConfig

from verl_credit.config.resolved import select
from verl_credit.names import ROLLOUT_NAME, VLLM_EXTENSION

ENGINE = "actor_rollout_ref.rollout.name"


@dataclass(frozen=True)
class Engine:
    """A value of ``actor_rollout_ref.rollout.name``."""

    name: str
    package: str = ""
    """The distribution that verl's extra of the engine's name pins; "" for the engine that verl_credit brings."""
    oldest: str = "0"
    """The oldest version that verl accepts."""
    asynchronous: str = ""
    """The versions that an asynchronous trainer can stop before a sync of weights."""
    devices: tuple[str, ...] = ("cpu", "cuda")
    reserves: bool = True
    """It takes ``gpu_memory_utilization`` of a device when it starts; else only what a batch needs."""
    splits: bool = True
    """It divides a model among several devices."""
    adapters: bool = True
    """It takes LoRA's adapters; else whole weights alone."""
    unused: int = 0
    """Positions of max_model_len that verl's server never fills."""
    extension: str = ""
    """Our class that extends the engine's worker, for a recipe that names none."""
    untried: str = ""
    """What has not been run."""
    ports: str = "not examined for what they open"
    """The ports that its processes open beyond loopback."""

    @property
    def ours(self) -> bool:
        """It generates with transformers, in verl_credit's own code: with a seed per request, and without a prefix cache."""
        return not self.package


ENGINES = {
    engine.name: engine
    for engine in (
        Engine(ROLLOUT_NAME, devices=("cpu",), reserves=False, splits=False, adapters=False, ports=""),
        Engine(
            "vllm",
            "vllm",
            oldest="0.18.0",
            asynchronous="<0.32",
            extension=VLLM_EXTENSION,
            ports="one for torch's store on all interfaces, without credentials",
        ),
        Engine(
            "sglang",
            "sglang",
            devices=("cuda",),
            unused=1,
            untried="requests are handed on, and no GPU has run it (docs/engines.md#sglang)",
        ),
    )
}


def engine_named(name: object) -> Engine:
    """The engine of that name. The rules refuse an unknown one, which counts as one that reserves its share."""
    return ENGINES.get(str(name)) or Engine(str(name), package=str(name))


def engine_of(config: DictConfig) -> Engine:
    """The recipe's engine."""
    return engine_named(select(config, ENGINE))
