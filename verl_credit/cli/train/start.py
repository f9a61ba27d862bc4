"""Starts `verl-credit train`: checks everything, starts Ray and the retriever, runs, reports, cleans up."""

import os
import shlex
import signal
import threading
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path

import psutil
from omegaconf import DictConfig, OmegaConf, open_dict

from verl_credit.cli.command import terminate_as_interrupt
from verl_credit.cli.saved_run import CONFIG
from verl_credit.cli.train.trial_row import TrialRow
from verl_credit.cli.train.with_verl import check_with_verl, set_environment
from verl_credit.errors import ConfigError, ExitCode, IntegrityError, PreflightError, Terminated
from verl_credit.recipe.compose import load_config, step_size_line
from verl_credit.recipe.doctor.checks import Stage, require
from verl_credit.recipe.doctor.context import Context
from verl_credit.recipe.doctor.network import network_lines
from verl_credit.recipe.doctor.software import wants_cuda
from verl_credit.recipe.doctor.status import Status
from verl_credit.recipe.this_machine import gather
from verl_credit.recipe.unread import idle_lines
from verl_credit.recipe.world import World, missing_line, world_of
from verl_credit.records.run import events
from verl_credit.records.run.files import METRICS, DamagedFile, write_text
from verl_credit.records.run.lock import run_lock
from verl_credit.records.run.progress_line import Progress, Throttled, say_at_once
from verl_credit.records.run.state import nothing_left, planned_in_all
from verl_credit.records.run.versions import write_versions
from verl_credit.redact import override_without_secrets, without_secrets

GOES_ON = "the next run goes on from the last checkpoint"
SAID = (ConfigError, PreflightError, IntegrityError, KeyboardInterrupt)


def start(name: str, overrides: list[str], config_dir: str | None = None) -> ExitCode:
    """Runs `train`. Raises ConfigError and PreflightError for refusals, KeyboardInterrupt for Ctrl-C and SIGTERM."""
    config = load_config(name, overrides, config_dir, may_fetch=True)
    if missing := missing_line(config):
        raise PreflightError(missing)
    with open_dict(config):
        if path := config.trainer.get("resume_from_path"):
            config.trainer.resume_from_path = str(Path(path).expanduser().absolute())
    set_environment(config)
    size = step_size_line(config, name, overrides, config_dir)
    return recorded(
        config, command_line(name, overrides, config_dir), partial(_run, size=size), GOES_ON, size
    )


def command_line(name: str, overrides: list[str], config_dir: str | None, command: str = "train") -> str:
    """Returns the command line in a shell's syntax, without secrets."""
    folder = ["--config-dir", config_dir] if config_dir else []
    given = map(override_without_secrets, overrides)
    return shlex.join(["verl-credit", command, "--config-name", name, *folder, *given])


Work = Callable[[DictConfig, Progress, TrialRow], tuple[ExitCode, str]]


def recorded(
    config: DictConfig, command: str, run: Work, interrupted: str, size: str, report: bool = True
) -> ExitCode:
    """Makes a run. However it ends, its events, the table of trials and the ``report`` say so. ``size``: the line about a
    step's rollouts (`step_size_line`).

    The command itself prints refusals, faults and interruptions. Errors of the recording never replace the error that
    ended the run.
    """
    run_dir = Path(config.run_dir).expanduser().resolve()
    with open_dict(config):
        config.run_dir = str(run_dir)
    with terminate_as_interrupt(), run_lock(run_dir, say_at_once):
        say, row, error = say_at_once, TrialRow(config), None
        try:
            progress = _progress(run_dir, config, command, size)
            say = progress.say
            code, why = run(config, progress, row)
            return code
        except BaseException as raised:
            error, (code, why) = raised, _how_it_ended(raised, interrupted)
            raise
        finally:
            trial = row.end(code, why, error)
            try:
                text = events.end(run_dir, code, why, planned_in_all(config), trial=trial)
            except (OSError, DamagedFile) as damage:
                text = f"{why} (not recorded: {damage})"
            if not isinstance(error, SAID):
                say(text)
            if trial and (row.failed or code is not ExitCode.PREFLIGHT):
                say(trial)
            if report and (run_dir / METRICS).exists():  # the run has made a step
                _report(run_dir, say if code is not ExitCode.PREFLIGHT else lambda _: None)


def _report(run_dir: Path, say: Callable[[str], None]) -> None:
    from verl_credit.records.report.write import write_report  # it draws; the end is recorded before

    try:
        say(f"report: {write_report(run_dir)}")
    except (ValueError, OSError) as error:
        say(f"no report: {error}")


def _run(config: DictConfig, progress: Progress, row: TrialRow, size: str) -> tuple[ExitCode, str]:
    run_dir = Path(config.run_dir)
    with ExitStack() as stack:
        checkpoints = Path(config.trainer.default_local_dir).resolve()
        if checkpoints != run_dir:  # two runs that wrote into it would resume from each other's checkpoints
            stack.enter_context(run_lock(checkpoints, say_at_once, "trainer.default_local_dir"))
        if reason := nothing_left(config):
            return ExitCode.NOTHING_LEFT, reason
        trial = row.begin()
        context = Context(gather(torch=wants_cuda(config)), config, check_with_verl, may_fetch=True)
        _make_ready(context, stack, progress)
        progress.note("lineage", trial) if row.failed else progress.say(trial)
        progress.say(size)
        save_config(config, run_dir)
        progress.note(events.STAGE, "starting Ray and the workers")
        stack.enter_context(progress)
        return _launch(config, progress.say)


def _how_it_ended(error: BaseException, interrupted: str) -> tuple[ExitCode, str]:
    if isinstance(error, KeyboardInterrupt):
        return ExitCode.INTERRUPTED, interrupted
    if isinstance(error, ConfigError | PreflightError):
        return ExitCode.PREFLIGHT, str(error)
    if isinstance(error, IntegrityError):
        return ExitCode.INTEGRITY, str(error)
    return ExitCode.FAILED, f"{type(error).__name__}: {error}"


def _progress(run_dir: Path, config: DictConfig, command: str, size: str) -> Progress:
    """Reads all files of the run, because a damaged file would end the run at its first step."""
    try:
        planned = planned_in_all(config)
        events.start(run_dir, planned, command, began=psutil.Process().create_time(), size=size)
        return Progress(run_dir, planned)
    except DamagedFile as error:
        raise PreflightError(f"{error}; fix the line or take another run_dir") from error


def _prepare_world(world: World, config: DictConfig, stack: ExitStack, progress: Progress) -> None:
    """Builds the world's files if absent and starts its retriever unless a URL is given."""
    from verl_credit_retriever.launch import start_server

    served = world.build(Throttled(progress.say, world.section))
    if served is None or config.search.url is not None:
        return
    beside = threading.Thread(target=_import_verl, daemon=True)
    beside.start()
    try:
        server = start_server(*served, log_path=Path(config.run_dir) / "retriever.log")
    except (RuntimeError, TimeoutError) as error:
        raise PreflightError(f"{world.section}.dir={config[world.section].dir}: {error}") from error
    stack.callback(server.stop)
    beside.join()
    with open_dict(config):
        config.search.url = server.url
    progress.note(events.STAGE, f"retriever ready at {server.url}")


def _import_verl() -> None:
    """Seconds of CPU that the checks need next, while the search server imports its own."""
    with suppress(Exception):  # the check of verl imports it again, and says what is wrong
        from verl_credit.host.process import launch  # noqa: F401


def _make_ready(context: Context, stack: ExitStack, progress: Progress) -> None:
    """Makes all checks of `train` and builds the recipe's world."""
    config = context.config
    _check(context, progress, Stage.MACHINE, Stage.CLUSTER)
    progress.note(events.STAGE, "the machine is checked")
    for line in idle_lines(config, context.settings):
        progress.note("idle", line)
    for line in network_lines(os.environ, config):
        progress.note("network", line)
    if (world := world_of(config)) is not None:
        _prepare_world(world, config, stack, progress)
    _preflight(context, progress)


def _preflight(context: Context, progress: Progress) -> None:
    _check(context, progress, Stage.INPUTS)
    decided = {
        "search.index_fingerprint": context.index_fingerprint,
        "algorithm.info_gain_prefix": context.answer_prefix,
    }
    for key, value in decided.items():
        if value is not None:  # so that the run's files and a resume know it
            OmegaConf.update(context.config, key, value, force_add=True)


def _check(context: Context, progress: Progress, *stages: Stage) -> None:
    for check, result in require(context, *stages):
        if result.status is Status.WARN:
            of_machine = check.event == "idle"
            line = f"warning: {result.name}: {result.line()}" if of_machine else result.found
            progress.note(check.event, line)
        elif result.status is Status.PASS and check.shown:
            progress.say(result.found)


def save_config(config: DictConfig, run_dir: Path) -> None:
    stored = without_secrets("", OmegaConf.to_container(config, resolve=True))
    write_text(run_dir / CONFIG, OmegaConf.to_yaml(OmegaConf.create(stored)))
    write_versions(run_dir)


def _launch(config: DictConfig, say: Callable[[str], None]) -> tuple[ExitCode, str]:
    from verl_credit.host.process.launch import RunFailed, launch

    try:
        launch(config, say)
    except IntegrityError as error:
        return ExitCode.INTEGRITY, str(error)
    except RunFailed as error:
        return ExitCode.FAILED, str(error)
    except KeyboardInterrupt as error:  # Ray raises its own in place of what a signal's handler raises
        raise Terminated if signal.getsignal(signal.SIGTERM) is signal.SIG_IGN else error from None
    return ExitCode.DONE, ""
