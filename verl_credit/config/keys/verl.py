"""Declares our keys of the policy loss, and verl's keys that our code divides by, compares or opens.

These are checked first, and have verl's defaults.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby
from typing import Annotated, Any, Literal

from pydantic import Field, create_model

from verl_credit.config.keys.run import Folder
from verl_credit.config.keys.section import Expected, OneOf, Section, When
from verl_credit.credit.loss import RATIO_LEVELS
from verl_credit.names import TRAINER_MODES

LOSS = "actor_rollout_ref.actor.policy_loss"
TARGET = "verl_credit.host.actor.policy_loss.TurnPolicyLossConfig"
"""``_target_``: verl's class refuses the keys below."""


class PolicyLoss(Section):
    prefix = LOSS

    ratio_level: Annotated[str, OneOf(tuple(RATIO_LEVELS)), When(lambda s: s.loss is not None)] = "turn"
    """Level of the importance ratio."""
    dynamic_clip: bool | Literal["auto"] = "auto"
    """Scale each turn's clip range by its gain; auto: where the mode gives turns a scale and the loss is ours."""
    clip_beta: Annotated[float, Field(ge=0, lt=1), When(lambda s: s.dynamic_clip)] = 0.3
    """Largest relative change of the clip range, below 1: at 1 a turn's range could shrink to nothing."""


Count = Annotated[int, Field(ge=0)]
Positive = Annotated[int, Field(ge=1)]
AtLeast0 = Annotated[float, Field(ge=0)]
AtLeastMinus1 = Annotated[int, Field(ge=-1)]
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
Logger = Annotated[str, OneOf(LOGGERS)]
Loggers = Annotated[Logger | list[Logger], Expected(f"one of {', '.join(LOGGERS)}, or a list of them")]


class VerlSection(Section):
    """A key that is absent is null."""

    lenient = True


ACTOR, ROLLOUT, REF = (f"actor_rollout_ref.{role}" for role in ("actor", "rollout", "ref"))
_KEYS: dict[str, Any] = {
    "algorithm.use_kl_in_reward": bool,
    "algorithm.kl_penalty": Literal[KL_PENALTIES],
    "data.prompt_key": str,
    "data.train_batch_size": Positive,
    "data.max_prompt_length": Positive,
    "data.max_response_length": Positive,
    "data.shuffle": bool,
    "actor_rollout_ref.model.lora_rank": Count | None,
    "actor_rollout_ref.model.use_remove_padding": bool,
    "actor_rollout_ref.model.external_lib": Modules,
    f"{ACTOR}.ppo_mini_batch_size": Positive,
    f"{ACTOR}.ppo_epochs": Positive,
    f"{ACTOR}.clip_ratio_low": AtLeast0,
    f"{ACTOR}.clip_ratio_high": AtLeast0,
    f"{ACTOR}.ppo_max_token_len_per_gpu": Positive | None,
    f"{ACTOR}.ulysses_sequence_parallel_size": Positive | None,
    f"{ACTOR}.use_dynamic_bsz": bool,
    f"{ACTOR}.use_kl_loss": bool,
    f"{ACTOR}.kl_loss_type": Literal[KL_PENALTIES],
    f"{ACTOR}.fsdp_config.ulysses_sequence_parallel_size": Positive | None,
    f"{LOSS}.loss_mode": str,  # `recipe.rules.own` checks it, because a user's loss may be registered
    f"{LOSS}.clip_cov_ratio": Share | None,
    f"{LOSS}.clip_cov_lb": float | None,
    f"{LOSS}.clip_cov_ub": float | None,
    f"{LOSS}.kl_cov_ratio": Share | None,
    f"{LOSS}.ppo_kl_coef": AtLeast0 | None,
    f"{LOSS}.dro_beta": AtLeast0 | None,
    f"{ROLLOUT}.n": Positive,
    f"{ROLLOUT}.temperature": Annotated[float, Field(ge=1e-3)],
    f"{ROLLOUT}.top_p": Annotated[float, Field(ge=1e-3, le=1)],
    f"{ROLLOUT}.top_k": AtLeastMinus1,
    f"{ROLLOUT}.multi_turn.max_tool_response_length": Positive,
    f"{ROLLOUT}.multi_turn.tool_response_truncate_side": Literal["left", "right", "middle"],
    f"{ROLLOUT}.multi_turn.max_parallel_calls": Positive | Literal["auto"],
    f"{ROLLOUT}.multi_turn.max_assistant_turns": Count | None,
    f"{ROLLOUT}.multi_turn.max_user_turns": Count | None,
    f"{ROLLOUT}.agent.num_workers": Positive,
    f"{ROLLOUT}.max_model_len": Positive | None,
    f"{ROLLOUT}.gpu_memory_utilization": Annotated[float, Field(ge=0.01, le=1)],
    f"{ROLLOUT}.log_prob_max_token_len_per_gpu": Positive | None,
    f"{ROLLOUT}.log_prob_use_dynamic_bsz": bool,
    f"{REF}.log_prob_max_token_len_per_gpu": Positive | None,
    f"{REF}.log_prob_use_dynamic_bsz": bool,
    f"{REF}.ulysses_sequence_parallel_size": Positive | None,
    f"{REF}.fsdp_config.ulysses_sequence_parallel_size": Positive | None,
    "reward.num_workers": Positive,
    "trainer.device": Literal["cpu", "cuda"],
    "trainer.logger": Loggers,
    "trainer.nnodes": Positive,
    "trainer.n_gpus_per_node": Positive,
    "trainer.save_freq": AtLeastMinus1,
    "trainer.test_freq": AtLeastMinus1,
    "trainer.total_epochs": Positive,
    "trainer.total_training_steps": Positive | None,
    "trainer.resume_mode": Literal["auto", "disable", "resume_path"],
    "trainer.resume_from_path": Annotated[
        str | Literal[False] | None, Expected("a folder, RUN/global_step_N, or null")
    ],
    "trainer.max_actor_ckpt_to_keep": Positive | None,
    "trainer.default_local_dir": Folder,
    "trainer.v1.trainer_mode": Literal[TRAINER_MODES],
    "trainer.v1.sampler.max_off_policy_threshold": Positive | None,
    "trainer.v1.sampler.max_off_policy_strategy": Literal["drop", "wait"],
    "trainer.v1.colocate_async.num_warmup_batches": AtLeast0,
    "trainer.v1.separate_async.num_warmup_batches": AtLeast0,
    "ray_kwargs.ray_init.num_cpus": Positive | None,
    "ray_kwargs.ray_init.num_gpus": Count | None,
    "ray_kwargs.ray_init.object_store_memory": Positive | None,
}


def _section(prefix: str, names: Iterable[str]) -> type[Section]:
    fields: dict[str, Any] = {name.rpartition(".")[2]: (_KEYS[name], ...) for name in names}
    section = create_model(f"verl.{prefix}", __base__=VerlSection, **fields)
    section.prefix = prefix
    return section


VERLS: tuple[type[Section], ...] = tuple(
    _section(*group) for group in groupby(_KEYS, lambda name: name.rpartition(".")[0])
)
"""The sections in the order in which they are checked."""
