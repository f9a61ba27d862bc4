"""Refuses settings under which the entropy probe inside training cannot work."""

from __future__ import annotations

from verl_credit.config.resolved import Tree, select
from verl_credit.config.settings import CreditSettings
from verl_credit.errors import ConfigError
from verl_credit.recipe.auto import COMPUTES_IN, FULL
from verl_credit.recipe.rules.trainer_mode import CORRECTION

EVERY = "probe.every"
ROLLOUT, MODEL = "actor_rollout_ref.rollout", "actor_rollout_ref.model"
ENGINE = "actor_rollout_ref.actor.fsdp_config"
OFF = "or switch the entropy probe off with probe.every=0"
FUSED = f"{MODEL}.use_fused_kernels"
BACKEND = f"{MODEL}.fused_kernel_options.impl_backend"


def validate_entropy_probe(config: Tree, settings: CreditSettings) -> None:
    """Raises ConfigError for the first fault."""
    probe = config.probe
    if not probe.every:
        return
    for key, right, why in _WRONG:
        value = select(config, key)
        if value is not None and not right(value):
            raise ConfigError(key=key, value=value, beside={EVERY: probe.every}, accepted=f"{why}, {OFF}")
    backend = select(config, BACKEND)
    if select(config, FUSED) and backend != "torch":
        why = "the gradient of that kernel's entropies has not been looked at; set it to torch, or use_fused_kernels=false"
        beside = {FUSED: True, EVERY: probe.every}
        raise ConfigError(key=BACKEND, value=backend, beside=beside, accepted=f"{why}, {OFF}")
    if config.data.train_batch_size < probe.groups:
        why = "every group needs a prompt of the step; at most data.train_batch_size"
        raise ConfigError.of(config, "probe.groups", "data.train_batch_size", accepted=why)


_WRONG = (
    (
        f"{ROLLOUT}.top_p",
        lambda p: p >= 1,
        "the actor's entropies are those of the whole distribution, and rollouts would be drawn from another; set it to 1",
    ),
    (
        f"{ROLLOUT}.top_k",
        lambda k: k <= 0,
        "the actor's entropies are those of the whole distribution, and rollouts would be drawn from another; set it to -1",
    ),
    (
        f"{CORRECTION}.bypass_mode",
        lambda on: not on,
        "verl then computes no entropies of the step's rollouts; set it to false",
    ),
    (
        "algorithm.filter_groups.enable",
        lambda on: not on,
        "the rollouts that are left are chosen by their rewards, no sample of the policy; set it to false",
    ),
    (
        f"{ENGINE}.model_dtype",
        lambda name: name in FULL,
        "weights in half precision hide the change that one update makes; set it to fp32 (mixed_precision may stay bf16)",
    ),
    (
        COMPUTES_IN,
        lambda name: name not in ("fp16", "float16"),
        "verl scales the loss in fp16, and gradients of another loss could overflow; set it to bf16 or fp32",
    ),
    (
        f"{ENGINE}.qat.enable",
        lambda on: not on,
        "quantised weights change in steps, which no gradient predicts; set it to false",
    ),
    (
        f"{MODEL}.enable_activation_offload",
        lambda on: not on,
        "verl offloads activations in training mode only, and the probe runs without dropout; set it to false",
    ),
)
