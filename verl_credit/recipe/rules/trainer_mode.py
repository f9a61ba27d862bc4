"""Checks the trainer, verl's rollout correction and the entropy probe inside training.

Refuses settings with which verl's asynchronous trainers or the probe cannot work.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from omegaconf import DictConfig

from verl_credit.config.keys import LOSS, reads
from verl_credit.config.resolved import select
from verl_credit.config.settings import CreditSettings
from verl_credit.errors import ConfigError
from verl_credit.names import ASYNC_MODES, COLOCATE_MODE, SEPARATE_MODE
from verl_credit.recipe.decisions import COMPUTES_IN, FULL, MODE, UPDATES
from verl_credit.recipe.step_size import BATCH, MINI_BATCH

ROLLOUT = "actor_rollout_ref.rollout"
LOG_PROBS, BACKEND = f"{ROLLOUT}.calculate_log_probs", f"{ROLLOUT}.checkpoint_engine.backend"
REWARDS, POOL = (f"reward.reward_model.{name}" for name in ("enable", "enable_resource_pool"))
PROBE, KEPT = "probe.every", "keep_rollouts.groups"
OLDEST, STRATEGY = (f"trainer.v1.sampler.max_off_policy_{name}" for name in ("threshold", "strategy"))
WARM_UP = {
    COLOCATE_MODE: "trainer.v1.colocate_async.num_warmup_batches",
    SEPARATE_MODE: "trainer.v1.separate_async.num_warmup_batches",
}


def validate_trainer_mode(config: DictConfig, settings: CreditSettings) -> Iterator[ConfigError]:
    """Yields a refusal for every fault of an asynchronous trainer."""
    wrong, mode = {}, select(config, MODE)
    if mode not in ASYNC_MODES:
        return
    if not select(config, LOG_PROBS):
        wrong[LOG_PROBS] = "only the engine knows the log-probs of the weights that wrote; set it to true"
    if select(config, PROBE):
        wrong[PROBE] = "the probe needs rollouts of the new weights, and these may be older; set it to 0"
    if select(config, OLDEST) is None:
        wrong[OLDEST] = "weights of any age could have written a rollout; set a whole number"
    if select(config, KEPT) is None:
        wrong[KEPT] = "all would be read as rollouts of one policy; set a whole number"
    if mode == SEPARATE_MODE:  # verl only asserts these
        devices = "its rollouts have devices of their own, beside trainer.n_gpus_per_node; set it"
        counts = (f"{ROLLOUT}.{name}" for name in ("nnodes", "n_gpus_per_node"))
        wrong |= {key: devices for key in counts if not select(config, key)}
        if select(config, BACKEND) == "naive":
            wrong[BACKEND] = "weights go to other devices: nccl, nixl or mooncake; object_store on CPUs"
        if select(config, REWARDS) and not select(config, POOL):
            wrong[POOL] = "the reward model would share devices with rollouts; set it to true"
    for key, use in wrong.items():
        yield ConfigError.of(config, key, MODE, accepted=use)
    batch, mini, updates = (select(config, key) for key in (BATCH, MINI_BATCH, UPDATES))
    if mode != SEPARATE_MODE:
        return
    if batch != mini * updates:
        use = f"every update takes a mini-batch of its own, so that it is {BATCH} / {MINI_BATCH}; set it to auto"
        yield ConfigError.of(config, UPDATES, MODE, BATCH, MINI_BATCH, accepted=use)
    elif updates > 1 and reads.transform(settings).uses_sepa_controller:
        use = (
            f"SEPA observes a step once, and every update has its own credit; set {BATCH}={mini}, or no sepa"
        )
        yield ConfigError.of(config, "algorithm.transform_mode", MODE, UPDATES, accepted=use)


def rollouts_too_old(config: DictConfig) -> Iterator[str]:
    """Warns of old rollouts: a step takes the oldest prompts, which with w batches ahead were started w steps before."""
    if select(config, MODE) not in ASYNC_MODES or select(config, STRATEGY) != "drop":
        return
    key = WARM_UP[select(config, MODE)]
    oldest, ahead = select(config, OLDEST), select(config, key)
    if math.ceil(ahead) >= oldest:
        yield (
            f"{key}={ahead} with {OLDEST}={oldest}: rollouts can be too old when they would be trained on; verl drops them "
            f"and makes others. Avoided with {key.rpartition('.')[2]}={oldest - 1}, or {STRATEGY}=wait"
        )


CORRECTION = "algorithm.rollout_correction"
BYPASS = "bypass_mode"
"""The name of verl's switch and of the loss that belongs to it."""

CORRECTION_DEFAULTS = {
    "rollout_is": None,
    "rollout_is_threshold": 2.0,
    "rollout_is_batch_normalize": False,
    "rollout_rs": None,
    "rollout_rs_threshold": None,
    "loss_type": "ppo_clip",
}


def validate_correction(config: DictConfig, settings: CreditSettings) -> Iterator[ConfigError]:
    """Yields a refusal of a mistake that verl accepts; `host.process.verl_checks` finds what verl itself refuses."""
    if select(config, f"{LOSS}.loss_mode") == BYPASS and not compares_with_the_writer(config):
        key = f"{CORRECTION}.{BYPASS}"
        use = f"that loss takes old_log_probs for the rollout engine's, and they are the trainer's; set {key}=true"
        yield ConfigError.of(config, f"{LOSS}.loss_mode", MODE, key, accepted=use)


def compares_with_the_writer(config: DictConfig) -> bool:
    """Does the loss compare a token with the engine's weights that wrote it? In the asynchronous trainers it does, unless
    the correction weighs or rejects tokens."""
    given = config.algorithm.get("rollout_correction") or {}
    corrected = given.get("rollout_is") is not None or given.get("rollout_rs") is not None
    return given.get(BYPASS, False) or (select(config, MODE) in ASYNC_MODES and not corrected)


def correction_without_effect(config: DictConfig) -> list[str]:
    """Returns the keys that are set and change nothing, with the reason."""
    given = config.algorithm.get("rollout_correction") or {}
    defaults = CORRECTION_DEFAULTS.items()
    idle = {name: given[name] for name, default in defaults if given.get(name, default) != default}
    if given.get(BYPASS, False):
        why = f"with {CORRECTION}.{BYPASS}=true verl's v1 trainer weighs no token and rejects none; set {BYPASS}=false"
    elif not select(config, LOG_PROBS):
        why = f"there is nothing to correct by without the rollout engine's log-probs; set {LOG_PROBS}=true"
    else:
        why = "what would read it is off"  # loss_type is read by the loss of bypass_mode in verl's older trainer alone
        on = tuple(name for name in ("rollout_is", "rollout_rs") if given.get(name) is not None)
        idle = {name: value for name, value in idle.items() if not name.startswith(on)}
    names = ", ".join(f"{CORRECTION}.{name}={value}" for name, value in idle.items())
    return [f"{names}: {why}"] if idle else []


MODEL = "actor_rollout_ref.model"
ENGINE = "actor_rollout_ref.actor.fsdp_config"
FUSED = f"{MODEL}.use_fused_kernels"
KERNEL = f"{MODEL}.fused_kernel_options.impl_backend"
WHOLE = "the actor's entropies are those of the whole distribution, and rollouts would be drawn from another; set it to"
SWITCHES = {
    f"{CORRECTION}.bypass_mode": "verl then computes no entropies of the step's rollouts",
    "algorithm.filter_groups.enable": "rewards choose the rollouts that are left, no sample of the policy",
    f"{ENGINE}.qat.enable": "quantised weights change in steps, which no gradient predicts",
    f"{MODEL}.enable_activation_offload": "verl offloads activations in training mode only, which the probe is not in",
}
"""The switches that have to be off, with the reason."""


def validate_entropy_probe(config: DictConfig, settings: CreditSettings) -> Iterator[ConfigError]:
    """Yields a refusal for every fault."""
    probe, rollout = config.probe, config.actor_rollout_ref.rollout
    if not probe.every:
        return
    wrong = {key: f"{why}; set it to false" for key, why in SWITCHES.items() if select(config, key)}
    if rollout.top_p < 1:
        wrong[f"{ROLLOUT}.top_p"] = f"{WHOLE} 1"
    if rollout.top_k > 0:
        wrong[f"{ROLLOUT}.top_k"] = f"{WHOLE} -1"
    if select(config, (weights := f"{ENGINE}.model_dtype")) not in (None, *FULL):
        wrong[weights] = "it hides the change of one update; set it to fp32 (mixed_precision may stay bf16)"
    if select(config, COMPUTES_IN) in ("fp16", "float16"):
        wrong[COMPUTES_IN] = "verl scales the loss, and gradients could overflow; set it to bf16 or fp32"
    if select(config, FUSED) and select(config, KERNEL) != "torch":
        wrong[KERNEL] = "its entropies' gradient is not examined; set it to torch, or use_fused_kernels=false"
    for key, why in wrong.items():
        beside = ({FUSED: True} if key == KERNEL else {}) | {PROBE: probe.every}
        use = f"{why}, or switch the entropy probe off with probe.every=0"
        yield ConfigError(key=key, value=select(config, key), beside=beside, accepted=use)
    if config.data.train_batch_size < probe.groups:
        why = "every group needs a prompt of the step; at most data.train_batch_size"
        yield ConfigError.of(config, "probe.groups", "data.train_batch_size", accepted=why)
