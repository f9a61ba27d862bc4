"""Runs a checked configuration on verl's trainer and says how it ended."""

from __future__ import annotations

import ray
from omegaconf import DictConfig
from ray.exceptions import RayError
from verl.trainer.main_ppo import run_ppo
from verl.trainer.ppo.utils import need_critic, need_reference_policy
from verl.utils.config import validate_config

from verl_credit.host.checks import IntegrityError
from verl_credit.host.compose import ConfigError
from verl_credit.host.preflight import check_names
from verl_credit.host.register import register_all, registered_names, require_registered
from verl_credit.host.task_runner import CreditTaskRunner


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


def launch(config: DictConfig) -> None:
    """Returns when the run is done. Raises IntegrityError or RunFailed; Ray is shut down in any case."""
    try:
        run_ppo(config, task_runner_class=CreditTaskRunner)
    except RayError as error:
        cause = getattr(error, "cause", None)
        if isinstance(cause, IntegrityError):
            raise cause from error
        raise RunFailed(f"{cause or error}\nworker logs: /tmp/ray/session_latest/logs") from error
    finally:
        ray.shutdown()
