"""Runs a checked configuration on verl's trainer and says how it ended."""

from __future__ import annotations

import os

import ray
from omegaconf import DictConfig, OmegaConf, open_dict
from ray.exceptions import RayError
from verl.trainer.main_ppo import run_ppo
from verl.trainer.ppo.utils import need_critic, need_reference_policy
from verl.utils.config import validate_config

from verl_credit.host.checks import IntegrityError
from verl_credit.host.compose import ConfigError
from verl_credit.host.preflight import check_names
from verl_credit.host.register import register_all, registered_names, require_registered
from verl_credit.host.task_runner import CreditTaskRunner

EVERYWHERE = ("VERL_PLATFORM", "OMP_NUM_THREADS", "TOKENIZERS_PARALLELISM")


class RunFailed(RuntimeError):
    """The run ended with an error that is none of ours to explain."""


def check_with_verl(config: DictConfig) -> None:
    """The plugin is registered here, every name is known, and verl accepts the configuration."""
    register_all()
    require_registered("the launching process", registered_names())
    check_names(config)
    try:
        validate_config(config, need_reference_policy(config), need_critic(config))
    except (AssertionError, ValueError, TypeError) as error:
        raise ConfigError(f"verl refuses the configuration: {error}") from error


def _tell_all_nodes(config: DictConfig) -> None:
    """Workers of a cluster that was there before do not inherit this process's environment: it travels with the job."""
    told = {name: os.environ[name] for name in EVERYWHERE if name in os.environ}
    with open_dict(config):
        given = OmegaConf.select(config, "ray_kwargs.ray_init.runtime_env.env_vars") or {}
        OmegaConf.update(config, "ray_kwargs.ray_init.runtime_env.env_vars", {**told, **given})


def launch(config: DictConfig) -> None:
    """Returns when the run is done. Raises IntegrityError or RunFailed; Ray is shut down in any case."""
    _tell_all_nodes(config)
    try:
        run_ppo(config, task_runner_class=CreditTaskRunner)
    except RayError as error:
        cause = getattr(error, "cause", None)
        if isinstance(cause, IntegrityError):
            raise cause from error
        raise RunFailed(f"{cause or error}\nworker logs: /tmp/ray/session_latest/logs") from error
    finally:
        ray.shutdown()
