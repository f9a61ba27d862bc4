"""`verl-credit train` starts a run on verl's trainer, or with -m a run for every combination of values."""

import os
from typing import Annotated

from typer import Option

from verl_credit.cli.command import SHIPPED, ConfigDir, Overrides, ends
from verl_credit.errors import ExitCode


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
