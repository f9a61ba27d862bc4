"""`verl-credit twin`: a training run of the lab in one process, without Ray."""

from __future__ import annotations

from pathlib import Path

import torch
from omegaconf import DictConfig, OmegaConf, open_dict

from verl_credit.commands.train import save_config
from verl_credit.errors import ConfigError, ExitCode, PreflightError
from verl_credit.names import ADV_ESTIMATOR, LOSS_MODE
from verl_credit.recipe.compose import load_config
from verl_credit.recipe.precision import COMPUTES_IN
from verl_credit.recipe.rules import validate
from verl_credit.recipe.world import world_of
from verl_credit.run import events
from verl_credit.run.files import METRICS
from verl_credit.run.finished import planned_in_all
from verl_credit.run.lock import run_lock
from verl_credit.run.progress import Throttled, say_at_once

A = "actor_rollout_ref.actor"
REWARD = "reward.custom_reward_function"
WITHOUT = {
    "algorithm.adv_estimator": ADV_ESTIMATOR,
    "algorithm.use_kl_in_reward": False,
    f"{A}.policy_loss.loss_mode": LOSS_MODE,
    f"{A}.use_kl_loss": False,
    f"{A}.shuffle": False,
    f"{A}.optim.optimizer": "AdamW",
    f"{A}.optim.optimizer_impl": "torch.optim",
    f"{A}.optim.lr_scheduler_type": "constant",
    f"{A}.optim.lr_warmup_steps": -1,
    f"{A}.optim.lr_warmup_steps_ratio": 0.0,
    "actor_rollout_ref.model.lora_rank": 0,
    COMPUTES_IN: "fp32",
    "algorithm.rollout_correction.rollout_is": None,
    "algorithm.rollout_correction.rollout_rs": None,
    "algorithm.rollout_correction.bypass_mode": False,
    f"{REWARD}.path": "pkg://verl_credit.reward.qa",
    f"{REWARD}.name": "compute_score",
    f"{REWARD}.reward_kwargs.format_penalty": 0.0,
    "data.shuffle": True,
    "data.train_max_samples": -1,
    "actor_rollout_ref.rollout.temperature": 1.0,
    "actor_rollout_ref.rollout.top_p": 1.0,
    "actor_rollout_ref.rollout.top_k": -1,
    "trainer.n_gpus_per_node": 1,
    "trainer.nnodes": 1,
    "trainer.val_before_train": True,
    "keep_rollouts": 0,
    "keep_checkpoints": [],
    "max_hours": None,
    "probe.every": 0,
}
"""What the twin has no code for: the only value that each key may have."""


def twin(name: str, overrides: list[str], config_dir: str | None = None) -> int:
    try:
        config = load_config(name, overrides, config_dir)
        validate(config)
        check_twin(config)
        return _run(config)
    except (ConfigError, PreflightError) as error:
        print(f"verl-credit twin: {error}", flush=True)
        return ExitCode.PREFLIGHT
    except KeyboardInterrupt:
        print("interrupted; a run of the twin does not go on: start it again in another folder", flush=True)
        return ExitCode.INTERRUPTED


def check_twin(config: DictConfig) -> None:
    """Raise ConfigError for what would be silently left out."""
    world = world_of(config)
    if world is None or world.section != "lab":
        raise ConfigError(
            "the twin trains in the lab's world alone: take --config-name lab, or a recipe based on it"
        )
    for key, only in WITHOUT.items():
        value = OmegaConf.select(config, key)
        if value is not None and value != only:
            raise ConfigError(
                key=key, value=value, accepted=f"the twin knows {only} alone; `train` takes every value"
            )


def _run(config: DictConfig) -> int:
    from verl_credit.twin.train import Twin

    run_dir = Path(config.run_dir).expanduser().resolve()
    with open_dict(config):
        config.run_dir = str(run_dir)
    torch.set_num_threads(config.cpu_threads)
    with run_lock(run_dir, say_at_once):
        if (run_dir / METRICS).exists():
            raise PreflightError(f"run_dir={run_dir} has a run already; expected a new folder")
        world_of(config).build(config, Throttled(say_at_once))
        events.start(run_dir, planned_in_all(config), "verl-credit twin")
        save_config(config, run_dir)
        Twin(config, run_dir, say_at_once).run()
        text = events.end(run_dir, ExitCode.DONE, "", planned_in_all(config), trial=None)
    say_at_once(text)
    return ExitCode.DONE
