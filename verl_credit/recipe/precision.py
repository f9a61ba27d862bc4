"""In which precision the actor computes, and how ``auto`` is decided."""

from __future__ import annotations

from omegaconf import DictConfig, OmegaConf

from verl_credit.config.resolved import Config, select
from verl_credit.precision import cpu_precision

COMPUTES_IN = "actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype"
FULL = ("fp32", "float32")
ENGINES = {"bf16": "bfloat16", "fp32": "float32"}


def compute_dtype(config: Config) -> str:
    """verl's default is bfloat16."""
    return str(select(config, COMPUTES_IN) or "bf16")


def decide_precision(config: DictConfig) -> None:
    """``auto`` becomes what the device multiplies fastest; an engine with ``dtype=auto`` then takes the same."""
    if select(config, COMPUTES_IN) != "auto":
        return
    found = cpu_precision() if select(config, "trainer.device") == "cpu" else "bf16"
    OmegaConf.update(config, COMPUTES_IN, found)
    if select(config, "actor_rollout_ref.rollout.dtype") == "auto":
        OmegaConf.update(config, "actor_rollout_ref.rollout.dtype", ENGINES[found])
