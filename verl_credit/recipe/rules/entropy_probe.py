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
WHOLE = "the actor's entropies are those of the whole distribution, and rollouts would be drawn from another; set it to"
SWITCHES = {
    f"{CORRECTION}.bypass_mode": "verl then computes no entropies of the step's rollouts",
    "algorithm.filter_groups.enable": "rewards choose the rollouts that are left, no sample of the policy",
    f"{ENGINE}.qat.enable": "quantised weights change in steps, which no gradient predicts",
    f"{MODEL}.enable_activation_offload": "verl offloads activations in training mode only, which the probe is not in",
}
"""The switches that have to be off, with the reason."""


def validate_entropy_probe(config: Tree, settings: CreditSettings) -> None:
    """Raises ConfigError for the first fault."""
    probe, rollout = config.probe, config.actor_rollout_ref.rollout
    if not probe.every:
        return
    wrong = {key: f"{why}; set it to false" for key, why in SWITCHES.items() if select(config, key)}
    if rollout.top_p < 1:
        wrong[f"{ROLLOUT}.top_p"] = f"{WHOLE} 1"
    if rollout.top_k > 0:
        wrong[f"{ROLLOUT}.top_k"] = f"{WHOLE} -1"
    if select(config, f"{ENGINE}.model_dtype") not in (None, *FULL):
        why = "weights in half precision hide the change of one update; set it to fp32 (mixed_precision may stay bf16)"
        wrong[f"{ENGINE}.model_dtype"] = why
    if select(config, COMPUTES_IN) in ("fp16", "float16"):
        why = "verl scales the loss in fp16, and gradients of another loss could overflow; set it to bf16 or fp32"
        wrong[COMPUTES_IN] = why
    for key, why in wrong.items():
        beside = {EVERY: probe.every}
        raise ConfigError(key=key, value=select(config, key), beside=beside, accepted=f"{why}, {OFF}")
    backend = select(config, BACKEND)
    if select(config, FUSED) and backend != "torch":
        why = "the gradient of that kernel's entropies has not been looked at; set it to torch, or use_fused_kernels=false"
        beside = {FUSED: True, EVERY: probe.every}
        raise ConfigError(key=BACKEND, value=backend, beside=beside, accepted=f"{why}, {OFF}")
    if config.data.train_batch_size < probe.groups:
        why = "every group needs a prompt of the step; at most data.train_batch_size"
        raise ConfigError.of(config, "probe.groups", "data.train_batch_size", accepted=why)
