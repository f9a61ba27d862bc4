"""Runs a checked configuration on verl's trainer, and reports how the run ended."""

from __future__ import annotations

import functools
import os
import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import ray
from omegaconf import DictConfig, OmegaConf, open_dict
from ray.exceptions import RayError
from verl.trainer import main_ppo
from verl.trainer.main_ppo import TaskRunnerV1, run_ppo
from verl.trainer.ppo.utils import need_critic, need_reference_policy
from verl.trainer.ppo.v1 import trainer_base
from verl.utils.config import validate_config

from verl_credit.errors import ConfigError, IntegrityError, PreflightError, Terminated
from verl_credit.host.process.reward_check import check_reward_function
from verl_credit.host.process.verl_checks import (
    check_correction,
    check_names,
    check_trace,
    line_of,
    register_all,
)
from verl_credit.host.registry import registered_names, require_registered
from verl_credit.recipe.doctor.network import loopback_settings, run_address, unreachable, why_not_loopback
from verl_credit.recipe.rules.refusals import refuse
from verl_credit.records.run import events
from verl_credit.redact import without_secrets

EVERYWHERE = ("VERL_PLATFORM", "VERL_USE_EXTERNAL_PLUGINS", "OMP_NUM_THREADS", "TOKENIZERS_PARALLELISM")
KEPT_TASKS = ("RAY_task_events_max_num_task_in_gcs", "10000")
"""Ray's head process keeps 100,000 tasks by default, for its dashboard; they took 0.9 MB per step of the lab."""
RAY_TOKEN = Path("~/.ray/auth_token")
"""ray.init writes it as the umask says, and who reads it can run code in the cluster."""
FRAMES = 4
"""The frames of a worker's traceback that the end of a run shows."""
SLOW_START = "timed out during startup"
"""ray.init's words where one of its helpers takes over 15 s to start; no setting changes that (ray-project/ray#65983)."""


@ray.remote(num_cpus=1)
class CreditTaskRunner(TaskRunnerV1.__ray_actor_class__):
    """verl's task runner, the process that owns the training loop, with the plugin registered and checked."""

    def run(self, config):
        register_all(config.trainer.v1.trainer_mode)
        require_registered("the task runner", registered_names())
        events.record(config.run_dir, events.STAGE, "the task runner is up")
        hide_secrets()
        return super().run(config)


def hide_secrets() -> None:
    """verl prints the whole configuration and hands it to the trackers (wandb, MLflow, ...); here both lose its secrets,
    but for ``trainer``, where verl reads a tracker's proxy."""
    show, tracking = main_ppo.pprint, trainer_base.Tracking

    @functools.wraps(tracking)
    def track(*args, config, **settings):
        kept = {"trainer": config["trainer"]} if "trainer" in config else {}
        return tracking(*args, config=without_secrets("", config) | kept, **settings)

    main_ppo.pprint = lambda value: show(without_secrets("", value))
    trainer_base.Tracking = track


class RunFailed(RuntimeError):
    """The run ended with an error that this project cannot explain."""


def check_with_verl(config: DictConfig) -> None:
    """Check that the plugin is registered, every name is known, and verl accepts the configuration."""
    register_all(config.trainer.v1.trainer_mode)
    require_registered("the launching process", registered_names())
    refuse((check_names, check_correction, check_trace, check_reward_function), config)
    try:
        validate_config(config, need_reference_policy(config), need_critic(config))
    except (AssertionError, ValueError, TypeError) as error:
        raise ConfigError(f"verl refuses the configuration: {error}") from error


def _tell_all_nodes(config: DictConfig) -> None:
    """Put the environment into the job, because workers of a cluster that was there before do not inherit it. Workers of a
    Ray of our own also get the settings that keep torch on loopback."""
    environment = {name: os.environ[name] for name in EVERYWHERE if name in os.environ}
    environment |= loopback_settings(os.environ, config)
    key = "ray_kwargs.ray_init.runtime_env.env_vars"
    with open_dict(config):
        OmegaConf.update(config, key, {**environment, **(OmegaConf.select(config, key) or {})})


def launch(config: DictConfig, say: Callable[[str], None] = print) -> None:
    """Run to the end, and shut Ray down in any case.

    Raises IntegrityError, RunFailed, or PreflightError where Ray did not start (a slow start is tried twice) or would not
    listen on loopback.
    """
    _tell_all_nodes(config)
    os.environ.setdefault(*KEPT_TASKS)
    if why := why_not_loopback(os.environ, config, ray.util.get_node_ip_address()):
        raise PreflightError(why)
    try:
        runner = _Runner(CreditTaskRunner, signal.getsignal(signal.SIGTERM), config.run_dir)
        try:
            run_ppo(config, task_runner_class=runner)
        except Exception as error:
            if ray.is_initialized() or SLOW_START not in str(error):
                raise
            say("Ray did not come up in time, as on a machine that is busy; it is started once more")
            run_ppo(config, task_runner_class=runner)
    except RayError as error:  # before ValueError: what a worker raised is both
        cause = getattr(error, "cause", None)
        if isinstance(cause, IntegrityError):
            raise cause from error
        raise RunFailed(_what_failed(error, cause)) from error
    except SystemExit as error:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # Ray's handler would exit again, in the shutdown
        raise _ended(error, config) from error
    except Exception as error:
        if ray.is_initialized():
            raise
        raise PreflightError(f"Ray does not start: {line_of(error)}; {_asked(config)}") from error
    finally:
        ray.shutdown()


class _Runner:
    """Stands in for `CreditTaskRunner`. When verl's `run_ppo` creates it, right after ray.init, it makes Ray's token the
    user's alone and takes SIGTERM back: with ray.init's handlers (the one in C++ aborts) no end would be recorded."""

    def __init__(self, runner, handler, run_dir: str):
        self._runner, self._handler, self._run_dir = runner, handler, run_dir

    def options(self, **given):
        return _Runner(self._runner.options(**given), self._handler, self._run_dir)

    def remote(self):
        with suppress(OSError):  # no such file, or another user's
            RAY_TOKEN.expanduser().chmod(0o600)
        signal.signal(signal.SIGTERM, self._handler)
        events.record(self._run_dir, events.STAGE, "Ray is up")
        return self._runner.remote()


def _ended(error: SystemExit, config: DictConfig) -> BaseException:
    """The error for a SystemExit. ray.init's handler of SIGTERM exits with 15; Ray sends one when it gives up a cluster."""
    address = run_address(os.environ, config)
    if address and not ray.is_initialized() and (why := unreachable(address)):
        return PreflightError(f"Ray does not start: no Ray answers at {address} ({why}); {_asked(config)}")
    if error.code == signal.SIGTERM:
        return Terminated()
    return RunFailed(f"Ray ended this process with exit code {error.code}\n{_worker_logs()}")


def _what_failed(error: RayError, cause: BaseException | None) -> str:
    """The cause, the last `FRAMES` of the worker's traceback (the text of Ray's error has it), and the place of the logs."""
    if cause is None:
        return f"{error}\n{_worker_logs()}"
    lines = [line for line in str(error).splitlines() if line.startswith("  ")]
    frames = [place for place, line in enumerate(lines) if line.startswith('  File "')][-FRAMES:]
    shown = lines[frames[0] :] if frames else []
    return "\n".join([f"{type(cause).__name__}: {cause}", *shown, _worker_logs()])


def _worker_logs() -> str:
    """The folder of this run's own Ray: another run's may be the latest session."""
    node = ray._private.worker._global_node
    return f"worker logs: {node.get_logs_dir_path() if node else '/tmp/ray/session_latest/logs'}"


def _asked(config: DictConfig) -> str:
    init = OmegaConf.select(config, "ray_kwargs.ray_init") or {}
    given = {key: init[key] for key in init if key != "runtime_env" and init[key] is not None}
    settings = [f"ray_kwargs.ray_init.{key}={value}" for key, value in given.items()]
    settings += [f"RAY_ADDRESS={os.environ['RAY_ADDRESS']}"] if os.environ.get("RAY_ADDRESS") else []
    return f"started with {', '.join(settings) or 'its defaults'}; `verl-credit doctor` checks further"
