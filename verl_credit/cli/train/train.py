"""`verl-credit train` starts a run on verl's trainer, or with -m a run for every combination of values; `verl-credit twin`
trains in the lab in one process, without Ray.
"""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from omegaconf import DictConfig, open_dict
from typer import Option

from verl_credit.cli.command import SHIPPED, ConfigDir, Overrides, ends, terminate_as_interrupt
from verl_credit.errors import ExitCode, IntegrityError, PreflightError
from verl_credit.records.run import events
from verl_credit.records.run.files import METRICS
from verl_credit.records.run.lock import run_lock
from verl_credit.records.run.progress_line import Throttled, say_at_once
from verl_credit.records.run.state import planned_in_all

if TYPE_CHECKING:
    from verl_credit.cli.train.trial_row import TrialRow

NOT_ON = "a run of the twin does not go on"


@ends("train", interrupted="interrupted; the next run goes on from the last checkpoint")
def train(
    config_name: Annotated[str, Option(help=SHIPPED)],
    config_dir: ConfigDir = None,
    multirun: Annotated[
        bool, Option("-m", "--multirun", help="a run for every combination of key=value,value")
    ] = False,
    overrides: Overrides = (),
) -> ExitCode:
    from verl_credit.recipe.doctor.network import ray_on_loopback

    ray_on_loopback(os.environ)  # before Ray is imported
    if multirun:
        from verl_credit.cli.train.sweep import sweep as run
    else:
        from verl_credit.cli.train.start import start as run
    return run(config_name, list(overrides), config_dir)


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
    from verl_credit.cli.train.start import command_line, how_it_ended
    from verl_credit.cli.train.trial_row import TrialRow
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
        row, code, why, error = TrialRow(config), ExitCode.DONE, "", None
        events.start(run_dir, planned_in_all(config), command)
        try:
            _run_twin(config, run_dir, row)
        except BaseException as raised:
            error, (code, why) = raised, how_it_ended(raised)
            why = NOT_ON if code is ExitCode.INTERRUPTED else why
            raise
        finally:
            trial = row.end(code, why, error)
            text = events.end(run_dir, code, why, planned_in_all(config), trial=trial)
            if code in (
                ExitCode.DONE,
                ExitCode.FAILED,
            ):  # else the command prints a refusal, a fault or an interruption
                say_at_once(text)
                say_at_once(trial)


def _run_twin(config: DictConfig, run_dir: Path, row: "TrialRow") -> None:
    import torch

    from verl_credit.cli.train.start import save_config
    from verl_credit.recipe.world import world_of
    from verl_credit.study.twin import Twin

    say_at_once(row.begin())
    torch.set_num_threads(config.cpu_threads)
    world_of(config).build(Throttled(say_at_once))
    save_config(config, run_dir)
    Twin(config, run_dir, say_at_once).run()
