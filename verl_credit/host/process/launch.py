"""Runs a checked configuration on verl's trainer and says how it ended."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

import ray
from omegaconf import DictConfig, OmegaConf, open_dict
from ray.exceptions import RayError
from verl.trainer.main_ppo import run_ppo
from verl.trainer.ppo.utils import need_critic, need_reference_policy
from verl.utils.config import validate_config

from verl_credit.errors import ConfigError, IntegrityError, PreflightError, Terminated
from verl_credit.host.process.correction import check_correction
from verl_credit.host.process.names import check_names
from verl_credit.host.process.register import register_all
from verl_credit.host.process.task_runner import CreditTaskRunner
from verl_credit.host.registry import registered_names, require_registered
from verl_credit.recipe.doctor.network import loopback_settings, run_address, unreachable, why_not_loopback

EVERYWHERE = ("VERL_PLATFORM", "VERL_USE_EXTERNAL_PLUGINS", "OMP_NUM_THREADS", "TOKENIZERS_PARALLELISM")

KEPT_TASKS = ("RAY_task_events_max_num_task_in_gcs", "10000")
"""Ray's head process remembers 100,000 tasks by default, for its dashboard: they took 0.9 MB a step of the lab."""


SLOW_START = "timed out during startup"
"""In what ray.init raises, a bare Exception, where its raylet did not come up. Ray 2.60's raylet ends itself if one of its
Python helpers takes over 15 s to start, which no setting changes (ray-project/ray#65983), as on a machine that is busy."""


class RunFailed(RuntimeError):
    """The run ended with an error that is none of ours to explain."""


def check_with_verl(config: DictConfig) -> None:
    """The plugin is registered here, every name is known, and verl accepts the configuration."""
    register_all()
    require_registered("the launching process", registered_names())
    check_names(config)
    check_correction(config)
    try:
        validate_config(config, need_reference_policy(config), need_critic(config))
    except (AssertionError, ValueError, TypeError) as error:
        raise ConfigError(f"verl refuses the configuration: {error}") from error


def _tell_all_nodes(config: DictConfig) -> None:
    """Workers of a cluster that was there before do not inherit this process's environment: it travels with the job.
    Those of a Ray of our own are told what keeps torch on loopback."""
    told = {name: os.environ[name] for name in EVERYWHERE if name in os.environ}
    told |= loopback_settings(os.environ, config)
    with open_dict(config):
        given = OmegaConf.select(config, "ray_kwargs.ray_init.runtime_env.env_vars") or {}
        OmegaConf.update(config, "ray_kwargs.ray_init.runtime_env.env_vars", {**told, **given})


def launch(config: DictConfig, say: Callable[[str], None] = print) -> None:
    """Returns when the run is done. Raises IntegrityError, RunFailed, or PreflightError where Ray did not start (a slow
    start is tried twice) or would not listen on loopback; Ray is shut down in any case."""
    _tell_all_nodes(config)
    os.environ.setdefault(*KEPT_TASKS)
    if why := why_not_loopback(os.environ, config, ray.util.get_node_ip_address()):
        raise PreflightError(why)
    try:
        _run(config, _Runner(CreditTaskRunner, signal.getsignal(signal.SIGTERM)), say)
    except RayError as error:  # before ValueError: what a worker raised is both
        cause = getattr(error, "cause", None)
        if isinstance(cause, IntegrityError):
            raise cause from error
        raise RunFailed(f"{cause or error}\nworker logs: /tmp/ray/session_latest/logs") from error
    except SystemExit as error:
        raise _ended(error, config) from error
    except Exception as error:
        if ray.is_initialized():
            raise
        raise PreflightError(f"Ray does not start: {_one_line(error)}; {_asked(config)}") from error
    finally:
        ray.shutdown()


def _run(config: DictConfig, runner: _Runner, say: Callable[[str], None]) -> None:
    try:
        run_ppo(config, task_runner_class=runner)
    except Exception as error:
        if ray.is_initialized() or SLOW_START not in str(error):
            raise
        say("Ray did not come up in time, as on a machine that is busy; it is started once more")
        run_ppo(config, task_runner_class=runner)


class _Runner:
    """In place of `CreditTaskRunner`, which verl's `run_ppo` makes right after ray.init: SIGTERM is ours again by then.

    ray.init puts two handlers there: one in Python, and one in C++ that prints a stack and aborts, so that nobody would
    write down how the run ended.
    """

    def __init__(self, made, handler):
        self._made, self._handler = made, handler

    def options(self, **given):
        return _Runner(self._made.options(**given), self._handler)

    def remote(self):
        signal.signal(signal.SIGTERM, self._handler)
        return self._made.remote()


def _ended(error: SystemExit, config: DictConfig) -> BaseException:
    """While ray.init runs, its handler of SIGTERM exits with 15; Ray sends us one when it gives up a cluster."""
    if not ray.is_initialized() and (why := _nobody_there(config)):
        return PreflightError(f"Ray does not start: {why}; {_asked(config)}")
    if error.code == signal.SIGTERM:
        return Terminated()
    return RunFailed(
        f"Ray ended this process with exit code {error.code}\nworker logs: /tmp/ray/session_latest/logs"
    )


def _nobody_there(config: DictConfig) -> str:
    address = run_address(os.environ, config)
    why = unreachable(address) if address else ""
    return why and f"nobody answers at {address} ({why})"


def _asked(config: DictConfig) -> str:
    init = OmegaConf.select(config, "ray_kwargs.ray_init") or {}
    told = [
        f"ray_kwargs.ray_init.{key}={init[key]}"
        for key in init
        if key != "runtime_env" and init[key] is not None
    ]
    told += [f"RAY_ADDRESS={os.environ['RAY_ADDRESS']}"] if os.environ.get("RAY_ADDRESS") else []
    return f"asked for with {', '.join(told) or 'its defaults'}; `verl-credit doctor` looks closer"


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
