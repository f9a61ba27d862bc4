"""`verl-credit twin`: a training run of the lab in one process, without Ray."""

from __future__ import annotations

from pathlib import Path

import torch
from omegaconf import DictConfig, open_dict

from verl_credit.cli.run.train import command_line, how_it_ended, save_config, terminate_as_interrupt
from verl_credit.cli.trials.row import TrialRow
from verl_credit.errors import ConfigError, ExitCode, IntegrityError, PreflightError
from verl_credit.recipe.compose import load_config
from verl_credit.recipe.machine.gather import gather
from verl_credit.recipe.world import world_of
from verl_credit.records.run import events
from verl_credit.records.run.files import METRICS
from verl_credit.records.run.finished import planned_in_all
from verl_credit.records.run.lock import run_lock
from verl_credit.records.run.progress import Throttled, say_at_once
from verl_credit.study.twin.check import check_twin

NOT_ON = "a run of the twin does not go on"


def twin(name: str, overrides: list[str], config_dir: str | None = None) -> int:
    try:
        config = load_config(name, overrides, config_dir)
        check_twin(config)
        return _run(config, command_line(name, overrides, config_dir, "twin"))
    except (ConfigError, PreflightError) as error:
        print(f"verl-credit twin: {error}", flush=True)
        return ExitCode.PREFLIGHT
    except IntegrityError as error:
        print(f"verl-credit twin: {error}", flush=True)
        return ExitCode.INTEGRITY
    except KeyboardInterrupt:
        print(f"interrupted; {NOT_ON}: start it again in another folder", flush=True)
        return ExitCode.INTERRUPTED


def _run(config: DictConfig, command: str) -> int:
    """Recorded as `train` records a run: its events, and a row in the table of trials, however it ends."""
    run_dir = Path(config.run_dir).expanduser().resolve()
    with open_dict(config):
        config.run_dir = str(run_dir)
    with terminate_as_interrupt(), run_lock(run_dir, say_at_once):
        if (run_dir / METRICS).exists():
            raise PreflightError(f"run_dir={run_dir} has a run already; expected a new folder")
        row = TrialRow(config, command)
        events.start(run_dir, planned_in_all(config), command)
        try:
            _train(config, run_dir, row)
        except BaseException as error:
            _end(config, *_how(error), row, error)
            raise
        _end(config, ExitCode.DONE, "", row)
    return ExitCode.DONE


def _train(config: DictConfig, run_dir: Path, row: TrialRow) -> None:
    from verl_credit.study.twin.train import Twin

    say_at_once(row.begin())
    row.machine(gather(torch=False))
    torch.set_num_threads(config.cpu_threads)
    world_of(config).build(Throttled(say_at_once))
    save_config(config, run_dir)
    Twin(config, run_dir, say_at_once).run()


def _how(error: BaseException) -> tuple[ExitCode, str]:
    if isinstance(error, KeyboardInterrupt):
        return ExitCode.INTERRUPTED, NOT_ON
    if isinstance(error, IntegrityError):
        return ExitCode.INTEGRITY, str(error)
    return how_it_ended(error)


def _end(
    config: DictConfig, code: ExitCode, why: str, row: TrialRow, error: BaseException | None = None
) -> None:
    """What `twin` says itself, a refusal, a fault or an interruption, is only written down here."""
    trial = row.end(code, why, error)
    text = events.end(Path(config.run_dir), code, why, planned_in_all(config), trial=trial)
    if code in (ExitCode.DONE, ExitCode.FAILED):
        say_at_once(text)
        say_at_once(trial)
