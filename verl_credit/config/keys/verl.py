"""Declares verl's keys that our code divides by, compares or opens, so that they are checked first, with verl's defaults."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, create_model

from verl_credit.config.keys.loss import LOSS
from verl_credit.config.keys.run import Folder
from verl_credit.config.keys.section import Expected, Section
from verl_credit.names import TRAINER_MODES

Count = Annotated[int, Field(ge=0)]
Positive = Annotated[int, Field(ge=1)]
AtLeast0 = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]
Modules = Annotated[
    str | list[str] | None, Expected("the name of a module that verl imports, a list of them, or null")
]
# fmt: off
LOGGERS = ("console", "file", "wandb", "mlflow", "swanlab", "vemlp_wandb", "tensorboard", "clearml", "trackio", "rl_insight")
VERLS_LOSSES = (
    "vanilla", "dppo_tv", "dppo_kl", "gspo", "sapo", "gpg", "clip_cov", "kl_cov", "geo_mean", "dro", "cispo", "bypass_mode",
)
# fmt: on
_KL = ("kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3")
KL_PENALTIES = (*_KL, *(f"{name}+" for name in _KL))
"""verl has no "full": it raises NotImplementedError."""
Loggers = Annotated[
    Literal[LOGGERS] | list[Literal[LOGGERS]], Expected(f"one of {', '.join(LOGGERS)}, or a list of them")
]


class VerlSection(Section):
    """A key that is absent is null."""

    model_config = ConfigDict(
        use_attribute_docstrings=False
    )  # pydantic would look for a class in this file's text
    lenient = True


def _section(prefix: str, **keys: Any) -> type[Section]:
    fields = {name: (kind, ...) for name, kind in keys.items()}
    section = create_model(f"verl.{prefix}", __base__=VerlSection, **fields)
    section.prefix = prefix
    return section


VERLS: tuple[type[Section], ...] = (
    _section("algorithm", use_kl_in_reward=bool, kl_penalty=Literal[KL_PENALTIES]),
    _section(
        "data",
        prompt_key=str,
        train_batch_size=Positive,
        max_prompt_length=Positive,
        max_response_length=Positive,
    ),
    _section("actor_rollout_ref.model", lora_rank=Count | None, external_lib=Modules),
    _section(
        "actor_rollout_ref.actor",
        ppo_mini_batch_size=Positive,
        ppo_epochs=Positive,
        clip_ratio_low=AtLeast0,
        clip_ratio_high=AtLeast0,
        ppo_max_token_len_per_gpu=Positive | None,
        ulysses_sequence_parallel_size=Positive | None,
        use_dynamic_bsz=bool,
        use_kl_loss=bool,
        kl_loss_type=Literal[KL_PENALTIES],
    ),
    _section("actor_rollout_ref.actor.fsdp_config", ulysses_sequence_parallel_size=Positive | None),
    _section(
        LOSS,
        loss_mode=str,  # `recipe.rules.own_loss` checks it, because a user's loss may be registered
        clip_cov_ratio=Share | None,
        clip_cov_lb=float | None,
        clip_cov_ub=float | None,
        kl_cov_ratio=Share | None,
        ppo_kl_coef=AtLeast0 | None,
        dro_beta=AtLeast0 | None,
    ),
    _section(
        "actor_rollout_ref.rollout",
        n=Positive,
        temperature=Annotated[float, Field(ge=1e-3)],
        top_p=Annotated[float, Field(ge=1e-3, le=1)],
        top_k=Annotated[int, Field(ge=-1)],
        max_model_len=Positive | None,
        gpu_memory_utilization=Annotated[float, Field(ge=0.01, le=1)],
        log_prob_max_token_len_per_gpu=Positive | None,
        log_prob_use_dynamic_bsz=bool,
    ),
    _section(
        "actor_rollout_ref.ref",
        log_prob_max_token_len_per_gpu=Positive | None,
        log_prob_use_dynamic_bsz=bool,
        ulysses_sequence_parallel_size=Positive | None,
    ),
    _section("actor_rollout_ref.ref.fsdp_config", ulysses_sequence_parallel_size=Positive | None),
    _section(
        "trainer",
        device=Literal["cpu", "cuda"],
        logger=Loggers,
        nnodes=Positive,
        n_gpus_per_node=Positive,
        save_freq=Annotated[int, Field(ge=-1)],
        test_freq=Annotated[int, Field(ge=-1)],
        total_epochs=Positive,
        total_training_steps=Positive | None,
        resume_mode=Literal["auto", "disable", "resume_path"],
        max_actor_ckpt_to_keep=Positive | None,
        default_local_dir=Folder,
    ),
    _section("trainer.v1", trainer_mode=Literal[TRAINER_MODES]),
    _section(
        "trainer.v1.sampler",
        max_off_policy_threshold=Positive | None,
        max_off_policy_strategy=Literal["drop", "wait"],
    ),
    _section("trainer.v1.colocate_async", num_warmup_batches=AtLeast0),
    _section("trainer.v1.separate_async", num_warmup_batches=AtLeast0),
    _section(
        "ray_kwargs.ray_init",
        num_cpus=Positive | None,
        num_gpus=Count | None,
        object_store_memory=Positive | None,
    ),
)
"""The sections in the order in which they are checked."""
