"""verl's own keys that our code divides by, compares or opens, checked before anything does. Their defaults are verl's."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from verl_credit.config.keys.loss import LOSS
from verl_credit.config.keys.run import Folder
from verl_credit.config.keys.section import Expected, Section
from verl_credit.names import TRAINER_MODES

Count = Annotated[int, Field(ge=0)]
Positive = Annotated[int, Field(ge=1)]
AtLeast0 = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]
# fmt: off
LOGGERS = ("console", "file", "wandb", "mlflow", "swanlab", "vemlp_wandb", "tensorboard", "clearml", "trackio", "rl_insight")
VERLS_LOSSES = (
    "vanilla", "dppo_tv", "dppo_kl", "gspo", "sapo", "gpg", "clip_cov", "kl_cov", "geo_mean", "dro", "cispo", "bypass_mode",
)
# fmt: on
_KL = ("kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3")
KL_PENALTIES = (*_KL, *(f"{name}+" for name in _KL))
"""verl has no "full": it raises NotImplementedError."""


class VerlSection(Section):
    lenient = True


class KL(VerlSection):
    prefix = "algorithm"
    use_kl_in_reward: bool
    kl_penalty: Literal[KL_PENALTIES]


class Data(VerlSection):
    prefix = "data"
    prompt_key: str
    train_batch_size: Positive
    max_prompt_length: Positive
    max_response_length: Positive


class Model(VerlSection):
    prefix = "actor_rollout_ref.model"
    lora_rank: Count | None
    external_lib: Annotated[
        str | list[str] | None, Expected("the name of a module that verl imports, a list of them, or null")
    ]


class Actor(VerlSection):
    prefix = "actor_rollout_ref.actor"
    ppo_mini_batch_size: Positive
    ppo_epochs: Positive
    clip_ratio_low: AtLeast0
    clip_ratio_high: AtLeast0
    ppo_max_token_len_per_gpu: Positive | None
    ulysses_sequence_parallel_size: Positive | None
    use_dynamic_bsz: bool
    use_kl_loss: bool
    kl_loss_type: Literal[KL_PENALTIES]


class ActorEngine(VerlSection):
    prefix = "actor_rollout_ref.actor.fsdp_config"
    ulysses_sequence_parallel_size: Positive | None


class Reference(VerlSection):
    prefix = "actor_rollout_ref.ref"
    log_prob_max_token_len_per_gpu: Positive | None
    log_prob_use_dynamic_bsz: bool
    ulysses_sequence_parallel_size: Positive | None


class ReferenceEngine(VerlSection):
    prefix = "actor_rollout_ref.ref.fsdp_config"
    ulysses_sequence_parallel_size: Positive | None


class Losses(VerlSection):
    prefix = LOSS
    loss_mode: str
    """Checked with `recipe.rules.own_loss`: a user's own may be registered."""
    clip_cov_ratio: Share | None
    clip_cov_lb: float | None
    clip_cov_ub: float | None
    kl_cov_ratio: Share | None
    ppo_kl_coef: AtLeast0 | None
    dro_beta: AtLeast0 | None


class Rollout(VerlSection):
    prefix = "actor_rollout_ref.rollout"
    n: Positive
    temperature: Annotated[float, Field(ge=1e-3)]
    top_p: Annotated[float, Field(ge=1e-3, le=1)]
    top_k: Annotated[int, Field(ge=-1)]
    max_model_len: Positive | None
    gpu_memory_utilization: Annotated[float, Field(ge=0.01, le=1)]
    log_prob_max_token_len_per_gpu: Positive | None
    log_prob_use_dynamic_bsz: bool


class Trainer(VerlSection):
    prefix = "trainer"
    device: Literal["cpu", "cuda"]
    logger: Annotated[
        Literal[LOGGERS] | list[Literal[LOGGERS]], Expected(f"one of {', '.join(LOGGERS)}, or a list of them")
    ]
    nnodes: Positive
    n_gpus_per_node: Positive
    save_freq: Annotated[int, Field(ge=-1)]
    test_freq: Annotated[int, Field(ge=-1)]
    total_epochs: Positive
    total_training_steps: Positive | None
    resume_mode: Literal["auto", "disable", "resume_path"]
    max_actor_ckpt_to_keep: Positive | None
    default_local_dir: Folder


class TrainerV1(VerlSection):
    prefix = "trainer.v1"
    trainer_mode: Literal[TRAINER_MODES]


class Sampler(VerlSection):
    prefix = "trainer.v1.sampler"
    max_off_policy_threshold: Positive | None
    max_off_policy_strategy: Literal["drop", "wait"]


class ColocateAsync(VerlSection):
    prefix = "trainer.v1.colocate_async"
    num_warmup_batches: AtLeast0


class SeparateAsync(VerlSection):
    prefix = "trainer.v1.separate_async"
    num_warmup_batches: AtLeast0


class RayInit(VerlSection):
    prefix = "ray_kwargs.ray_init"
    num_cpus: Positive | None
    num_gpus: Count | None
    object_store_memory: Positive | None
