"""`verl-credit train` starts a run on verl's trainer; `verl-credit twin` trains in the lab in one process, without Ray."""

import os
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from omegaconf import DictConfig
from typer import Option

from verl_credit.cli.command import SHIPPED, ConfigDir, Overrides, ends
from verl_credit.errors import ExitCode, IntegrityError, PreflightError
from verl_credit.records.run.files import METRICS
from verl_credit.records.run.progress_line import Progress, Throttled, say_at_once

if TYPE_CHECKING:
    from verl_credit.cli.train.trial_row import TrialRow

FAULT = {IntegrityError: ExitCode.INTEGRITY}


@ends("train", interrupted="interrupted; the next run goes on from the last checkpoint")
def train(
    config_name: Annotated[str, Option(help=SHIPPED)],
    config_dir: ConfigDir = None,
    overrides: Overrides = (),
) -> ExitCode:
    from verl_credit.recipe.doctor.network import ray_on_loopback

    ray_on_loopback(os.environ)  # before Ray is imported
    from verl_credit.cli.train.start import start

    return start(config_name, list(overrides), config_dir)


@ends("twin", failed=FAULT, interrupted="interrupted; start it again in another folder")
def twin(
    config_name: Annotated[str, Option(help="lab, or a recipe of yours based on it")],
    config_dir: ConfigDir = None,
    overrides: Overrides = (),
) -> ExitCode:
    """Runs the twin and records it as `train` does, with events and a row in the table of trials for every end."""
    from verl_credit.cli.train.start import command_line, recorded
    from verl_credit.recipe.compose import load_config, step_size_line
    from verl_credit.study.twin_check import check_twin

    config = load_config(config_name, overrides, config_dir)
    check_twin(config)
    if (Path(config.run_dir).expanduser() / METRICS).exists():
        raise PreflightError(f"run_dir={config.run_dir} has a run already; expected a new folder")
    command = command_line(config_name, overrides, config_dir, "twin")
    size = step_size_line(config, config_name, overrides, config_dir)
    return recorded(
        config, command, partial(_run_twin, size=size), "a run of the twin does not go on", size, report=False
    )


def _run_twin(config: DictConfig, progress: Progress, row: "TrialRow", size: str) -> tuple[ExitCode, str]:
    import torch

    from verl_credit.cli.train.start import save_config
    from verl_credit.recipe.world import world_of
    from verl_credit.study.twin import Twin

    say_at_once(row.begin())
    say_at_once(size)
    torch.set_num_threads(config.cpu_threads)
    world_of(config).build(Throttled(say_at_once))
    save_config(config, Path(config.run_dir))
    Twin(config, Path(config.run_dir), say_at_once).run()
    return ExitCode.DONE, ""
