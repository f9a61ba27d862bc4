"""Checks the trainer, verl's rollout correction and the entropy probe inside training.

Refuses settings with which verl's asynchronous trainers or the probe cannot work.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from verl_credit.config.keys import LOSS, reads
from verl_credit.config.resolved import Config, Tree, select
from verl_credit.config.settings import CreditSettings
from verl_credit.errors import ConfigError
from verl_credit.names import ASYNC_MODES, COLOCATE_MODE, SEPARATE_MODE
from verl_credit.recipe.decisions import BATCH, COMPUTES_IN, FULL, MINI_BATCH, MODE, UPDATES

V1 = "trainer.v1"
ROLLOUT = "actor_rollout_ref.rollout"
BACKEND = f"{ROLLOUT}.checkpoint_engine.backend"
REWARDS, POOL = (f"reward.reward_model.{name}" for name in ("enable", "enable_resource_pool"))
KEPT = "keep_rollouts.groups"
LOG_PROBS, PROBE = f"{ROLLOUT}.calculate_log_probs", "probe.every"
OLDEST, STRATEGY = (f"{V1}.sampler.max_off_policy_{name}" for name in ("threshold", "strategy"))
WARM_UP = {
    COLOCATE_MODE: f"{V1}.colocate_async.num_warmup_batches",
    SEPARATE_MODE: f"{V1}.separate_async.num_warmup_batches",
}


def validate_trainer_mode(config: Tree, settings: CreditSettings) -> Iterator[ConfigError]:
    """Yields a refusal for every fault."""
    if select(config, MODE) not in ASYNC_MODES:
        return
    if not select(config, LOG_PROBS):
        use = "the ratio of a token is to the weights that wrote it, and only the engine knows its log-prob; set it to true"
        yield ConfigError.of(config, LOG_PROBS, MODE, accepted=use)
    if select(config, PROBE):
        use = "the entropy probe needs rollouts of the new weights, and these may be older; set it to 0"
        yield ConfigError.of(config, PROBE, MODE, accepted=use)
    if select(config, OLDEST) is None:
        use = "weights of any age could have written a rollout, and its tokens be clipped; set a whole number"
        yield ConfigError.of(config, OLDEST, MODE, accepted=use)
    if select(config, KEPT) is None:
        use = "who reads all takes them for rollouts of one policy, and these may be of several; set a whole number"
        yield ConfigError.of(config, KEPT, MODE, accepted=use)
    if select(config, MODE) != SEPARATE_MODE:
        return
    # verl only asserts these.
    for key in (f"{ROLLOUT}.nnodes", f"{ROLLOUT}.n_gpus_per_node"):
        if not select(config, key):
            use = "its rollouts have devices of their own, and trainer.n_gpus_per_node counts those that train; set it"
            yield ConfigError.of(config, key, MODE, accepted=use)
    if select(config, BACKEND) == "naive":
        use = "weights go to other devices: nccl, nixl, mooncake or another backend of verl's; object_store on CPUs"
        yield ConfigError.of(config, BACKEND, MODE, accepted=use)
    if select(config, REWARDS) and not select(config, POOL):
        use = "the reward model would share devices with rollouts that never pause; set it to true"
        yield ConfigError.of(config, POOL, MODE, accepted=use)
    batch, mini, updates = (select(config, key) for key in (BATCH, MINI_BATCH, UPDATES))
    if batch != mini * updates:
        use = f"every update takes a mini-batch of its own, so that it is {BATCH} / {MINI_BATCH}; set it to auto"
        yield ConfigError.of(config, UPDATES, MODE, BATCH, MINI_BATCH, accepted=use)
    elif updates > 1 and reads.transform(settings).uses_sepa_controller:
        use = "SEPA observes a step once, and every update has a credit of its own; set a transform without sepa"
        use += f", or {BATCH}={mini}"
        yield ConfigError.of(config, "algorithm.transform_mode", MODE, UPDATES, accepted=use)


def rollouts_too_old(config: Config) -> Iterator[str]:
    """Warns of old rollouts: a step takes the oldest prompts, which with w batches ahead were started w steps before."""
    if select(config, MODE) not in ASYNC_MODES or select(config, STRATEGY) != "drop":
        return
    key = WARM_UP[select(config, MODE)]
    oldest, ahead = select(config, OLDEST), select(config, key)
    if math.ceil(ahead) >= oldest:
        yield (
            f"{key}={ahead} with {OLDEST}={oldest}: rollouts that are made so far ahead can be too old when they would be "
            "trained on; verl drops them and makes others: every step trains, and many rollouts are made for nothing. "
            f"Avoided with {key.rpartition('.')[2]}={oldest - 1}, or {STRATEGY}=wait"
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


def validate_correction(config: Tree, settings: CreditSettings) -> Iterator[ConfigError]:
    """Yields a refusal of a mistake that verl accepts; `host.process.verl_checks` finds what verl itself refuses."""
    if select(config, f"{LOSS}.loss_mode") == BYPASS and not compares_with_the_writer(config):
        key = f"{CORRECTION}.{BYPASS}"
        use = f"that loss takes old_log_probs for the rollout engine's, and they are the trainer's; set {key}=true"
        yield ConfigError.of(config, f"{LOSS}.loss_mode", MODE, key, accepted=use)


def compares_with_the_writer(config: Config) -> bool:
    """Does the loss compare a token with the engine's weights that wrote it?

    It does in the asynchronous trainers, unless the correction weighs or rejects tokens by the engine's difference.
    """
    given = config.algorithm.get("rollout_correction") or {}
    if given.get(BYPASS, False):
        return True
    corrected = given.get("rollout_is") is not None or given.get("rollout_rs") is not None
    return select(config, MODE) in ASYNC_MODES and not corrected


def correction_without_effect(config: Config) -> list[str]:
    """Returns the keys that are set and change nothing, with the reason."""
    given = config.algorithm.get("rollout_correction") or {}
    defaults = CORRECTION_DEFAULTS.items()
    idle = {name: given[name] for name, default in defaults if given.get(name, default) != default}
    if given.get(BYPASS, False):
        why = f"with {CORRECTION}.{BYPASS}=true verl's v1 trainer weighs no token and rejects none; set {BYPASS}=false"
    elif not config.actor_rollout_ref.rollout.calculate_log_probs:
        why = "there is nothing to correct by without the rollout engine's log-probs; set "
        why += "actor_rollout_ref.rollout.calculate_log_probs=true"
    else:
        why = "what would read it is off"  # loss_type is read by the loss of bypass_mode in verl's older trainer alone
        if given.get("rollout_is") is not None:
            idle = {name: value for name, value in idle.items() if not name.startswith("rollout_is")}
        if given.get("rollout_rs") is not None:
            idle = {name: value for name, value in idle.items() if not name.startswith("rollout_rs")}
    names = ", ".join(f"{CORRECTION}.{name}={value}" for name, value in idle.items())
    return [f"{names}: {why}"] if idle else []


MODEL = "actor_rollout_ref.model"
ENGINE = "actor_rollout_ref.actor.fsdp_config"
OFF = "or switch the entropy probe off with probe.every=0"
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


def validate_entropy_probe(config: Tree, settings: CreditSettings) -> Iterator[ConfigError]:
    """Yields a refusal for every fault."""
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
        beside = {PROBE: probe.every}
        yield ConfigError(key=key, value=select(config, key), beside=beside, accepted=f"{why}, {OFF}")
    backend = select(config, KERNEL)
    if select(config, FUSED) and backend != "torch":
        why = "the gradient of that kernel's entropies has not been looked at; set it to torch, or use_fused_kernels=false"
        beside = {FUSED: True, PROBE: probe.every}
        yield ConfigError(key=KERNEL, value=backend, beside=beside, accepted=f"{why}, {OFF}")
    if config.data.train_batch_size < probe.groups:
        why = "every group needs a prompt of the step; at most data.train_batch_size"
        yield ConfigError.of(config, "probe.groups", "data.train_batch_size", accepted=why)
