"""`verl-credit twin` trains in the lab in one process, without Ray."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from omegaconf import DictConfig, open_dict
from typer import Option

from verl_credit.cli.command import ConfigDir, Overrides, ends
from verl_credit.errors import ExitCode, IntegrityError, PreflightError
from verl_credit.records.run import events
from verl_credit.records.run.files import METRICS
from verl_credit.records.run.finished import planned_in_all
from verl_credit.records.run.lock import run_lock
from verl_credit.records.run.progress import Throttled, say_at_once

if TYPE_CHECKING:
    from verl_credit.cli.trials.row import TrialRow

NOT_ON = "a run of the twin does not go on"


@ends(
    "twin",
    failed={IntegrityError: ExitCode.INTEGRITY},
    interrupted=f"interrupted; {NOT_ON}: start it again in another folder",
)
def twin(
    config_name: Annotated[str, Option(help="lab, or a recipe of yours based on it")],
    config_dir: ConfigDir = None,
    overrides: Overrides = (),
) -> None:
    """Runs the twin and records it as `train` does, with events and a row in the table of trials for every end."""
    from verl_credit.cli.train.start import command_line, how_it_ended, terminate_as_interrupt
    from verl_credit.cli.trials.row import TrialRow
    from verl_credit.recipe.compose import load_config
    from verl_credit.study.twin_check import check_twin

    config = load_config(config_name, overrides, config_dir)
    check_twin(config)
    command = command_line(config_name, overrides, config_dir, "twin")
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
            code, why = how_it_ended(error)
            _end(config, code, NOT_ON if code is ExitCode.INTERRUPTED else why, row, error)
            raise
        _end(config, ExitCode.DONE, "", row)


def _train(config: DictConfig, run_dir: Path, row: TrialRow) -> None:
    import torch

    from verl_credit.cli.train.start import save_config
    from verl_credit.recipe.machine.gather import gather
    from verl_credit.recipe.world import world_of
    from verl_credit.study.twin import Twin

    say_at_once(row.begin())
    row.machine(gather(torch=False))
    torch.set_num_threads(config.cpu_threads)
    world_of(config).build(Throttled(say_at_once))
    save_config(config, run_dir)
    Twin(config, run_dir, say_at_once).run()


def _end(
    config: DictConfig, code: ExitCode, why: str, row: TrialRow, error: BaseException | None = None
) -> None:
    """Records the end. The command itself prints a refusal, a fault or an interruption."""
    trial = row.end(code, why, error)
    text = events.end(Path(config.run_dir), code, why, planned_in_all(config), trial=trial)
    if code in (ExitCode.DONE, ExitCode.FAILED):
        say_at_once(text)
        say_at_once(trial)
