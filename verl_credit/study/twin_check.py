"""Refuses, by key and before anything is built, what the twin has no code for."""

from __future__ import annotations

from omegaconf import DictConfig, OmegaConf

from verl_credit.errors import ConfigError
from verl_credit.names import ADV_ESTIMATOR, LOSS_MODE
from verl_credit.recipe.decisions import COMPUTES_IN
from verl_credit.recipe.world import world_of
from verl_credit.turns.score.scorers.reference import KL_LOSS

A = "actor_rollout_ref.actor"
REWARD = "reward.custom_reward_function"
WITHOUT = {
    "algorithm.adv_estimator": ADV_ESTIMATOR,
    "algorithm.use_kl_in_reward": False,
    f"{A}.policy_loss.loss_mode": LOSS_MODE,
    KL_LOSS: False,
    f"{A}.shuffle": False,
    f"{A}.optim.optimizer": "AdamW",
    f"{A}.optim.optimizer_impl": "torch.optim",
    f"{A}.optim.lr_scheduler_type": "constant",
    f"{A}.optim.lr_warmup_steps": -1,
    f"{A}.optim.lr_warmup_steps_ratio": 0.0,
    "actor_rollout_ref.model.lora_rank": 0,
    "critic.enable": False,
    COMPUTES_IN: "fp32",
    "algorithm.rollout_correction.rollout_is": None,
    "algorithm.rollout_correction.rollout_rs": None,
    "algorithm.rollout_correction.bypass_mode": False,
    f"{REWARD}.path": "pkg://verl_credit.turns.rollout.reward.qa",
    f"{REWARD}.name": "compute_score",
    f"{REWARD}.reward_kwargs.format_penalty": 0.0,
    "data.shuffle": True,
    "data.train_max_samples": -1,
    "actor_rollout_ref.rollout.temperature": 1.0,
    "actor_rollout_ref.rollout.top_p": 1.0,
    "actor_rollout_ref.rollout.top_k": -1,
    "trainer.n_gpus_per_node": 1,
    "trainer.nnodes": 1,
    "max_hours": None,
    "probe.every": 0,
}
"""The only value that each key may have: the twin has no code for other values."""


def check_twin(config: DictConfig) -> None:
    """Raise ConfigError for what would be silently left out."""
    world = world_of(config)
    if world is None or world.section != "lab":
        raise ConfigError(
            "the twin trains in the lab's world alone: take --config-name lab, or a recipe on it"
        )
    if config.keep_rollouts.groups is None:
        use = "the twin knows a number alone, and keeps no rollouts; `train` takes every value"
        raise ConfigError(key="keep_rollouts.groups", value=None, accepted=use)
    for key, only in WITHOUT.items():
        value = OmegaConf.select(config, key)
        if key == KL_LOSS and config.actor_rollout_ref.actor.kl_loss_coef == 0:
            continue  # it loads a reference, and adds 0 to the loss
        if value is not None and value != only:
            use = f"the twin knows {only} alone; `train` takes every value"
            raise ConfigError(key=key, value=value, accepted=use)
