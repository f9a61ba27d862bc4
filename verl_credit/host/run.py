"""`verl-credit train`: check everything, start what is needed, run verl's trainer, clean up."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from omegaconf import DictConfig, OmegaConf, open_dict

from verl_credit.host.compose import ConfigError, load_config
from verl_credit.host.preflight import (
    PreflightError,
    check_data,
    check_model,
    check_names,
    check_server,
)
from verl_credit.host.progress import Progress, Throttled
from verl_credit.host.run_files import METRICS
from verl_credit.host.validate import validate

DONE, PREFLIGHT, INTEGRITY, INTERRUPTED = 0, 4, 5, 130

# Read by Ray and verl in this process and handed on to every worker.
ENVIRONMENT = {
    "RAY_worker_niceness": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "TOKENIZERS_PARALLELISM": "false",
}
CPU_ENVIRONMENT = {"VERL_PLATFORM": "cpu", "OMP_NUM_THREADS": "1"}


def train(name: str, overrides: list[str], config_dir: str | None = None) -> int:
    """Exit code: 0 done, 4 not started (configuration, data, server), 5 stopped to protect the numbers."""
    try:
        config = load_config(name, overrides, config_dir)
        validate(config)
        return _train(config)
    except (ConfigError, PreflightError) as error:
        print(f"verl-credit train: {error}", flush=True)
        return PREFLIGHT
    except KeyboardInterrupt:
        print("interrupted; the next run goes on from the last checkpoint", flush=True)
        return INTERRUPTED


def _train(config: DictConfig) -> int:
    with open_dict(config):
        config.run_dir = str(Path(config.run_dir).expanduser().resolve())
    run_dir = Path(config.run_dir)
    run_dir.mkdir(parents=True, exist_ok=True)
    cpu = config.trainer.device == "cpu"
    for key, value in {**ENVIRONMENT, **(CPU_ENVIRONMENT if cpu else {})}.items():
        os.environ.setdefault(key, value)
    with _terminate_as_interrupt(), ExitStack() as stack:
        progress = Progress(run_dir, config.trainer.total_training_steps or 0)
        if "lab" in config:
            _prepare_lab(config, stack, progress)
        _preflight(config)
        OmegaConf.save(config, run_dir / "config.yaml", resolve=True)
        stack.callback(_report, run_dir, progress)
        stack.enter_context(progress)
        progress.say("starting Ray and the workers")
        return _run_verl(config, progress)


def _report(run_dir: Path, progress: Progress) -> None:
    """Written however the run ended, as long as it made a step."""
    from verl_credit.report import write_report

    if (run_dir / METRICS).exists():
        progress.say(f"report: {write_report(run_dir)}")


def _prepare_lab(config: DictConfig, stack: ExitStack, progress: Progress) -> None:
    """Build the lab's files if absent; start its retriever unless a URL is given."""
    from verl_credit_retriever.launch import start_server

    from verl_credit.lab.build import build_lab

    lab = build_lab(
        Path(config.lab.dir),
        world_seed=config.lab.world_seed,
        size=config.lab.size,
        progress=Throttled(progress.say),
    )
    if config.search.url is None:
        index = Path(config.lab.index) if config.lab.index else lab.index
        server = start_server(index, lab.encoder, log_path=Path(config.run_dir) / "retriever.log")
        stack.callback(server.stop)
        with open_dict(config):
            config.search.url = server.url
        progress.say(f"retriever ready at {server.url}")


def _preflight(config: DictConfig) -> None:
    if config.search.url is None:
        raise PreflightError("search.url has no value: give the URL of a running retriever")
    check_server(config.search.url, config.search.timeout_s)
    check_model(config.actor_rollout_ref.model.path)
    check_data(config.data.train_files, "data.train_files")
    check_data(config.data.val_files, "data.val_files")
    from verl_credit.host.register import register_all, registered_names, require_registered

    register_all()
    require_registered("the launching process", registered_names())
    check_names(config)
    _check_with_verl(config)


def _check_with_verl(config: DictConfig) -> None:
    """verl's own validation, with its assertion as our message."""
    from verl.trainer.ppo.utils import need_critic, need_reference_policy
    from verl.utils.config import validate_config

    try:
        validate_config(config, need_reference_policy(config), need_critic(config))
    except (AssertionError, ValueError, TypeError) as error:
        raise ConfigError(f"verl refuses the configuration: {error}") from error


def _run_verl(config: DictConfig, progress: Progress) -> int:
    import ray
    from ray.exceptions import RayError
    from verl.trainer.main_ppo import run_ppo

    from verl_credit.host.checks import IntegrityError
    from verl_credit.host.task_runner import CreditTaskRunner

    try:
        run_ppo(config, task_runner_class=CreditTaskRunner)
    except RayError as error:
        cause = getattr(error, "cause", None)
        if isinstance(cause, IntegrityError):
            progress.say(f"stopped: {cause}")
            return INTEGRITY
        progress.say(f"failed: {cause or error}\nworker logs: /tmp/ray/session_latest/logs")
        return 1
    finally:
        ray.shutdown()
    return DONE


@contextmanager
def _terminate_as_interrupt() -> Iterator[None]:
    """SIGTERM ends the run the way Ctrl-C does: Ray and the retriever are stopped."""

    def interrupt(signum, frame):
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
