"""Builds the world of a configuration in a file: `python -m verl_credit.recipe.build_world FILE`, a process of its own."""

from __future__ import annotations

import sys
from pathlib import Path

from omegaconf import OmegaConf

from verl_credit.errors import ExitCode, PreflightError
from verl_credit.recipe.world import world_of
from verl_credit.records.run.progress import Throttled, say_at_once


def main(file: Path) -> int:
    config = OmegaConf.load(file)
    world = world_of(config)
    try:
        world.build(config, Throttled(say_at_once, world.section))
    except PreflightError as error:
        print(error, flush=True)
        return ExitCode.PREFLIGHT
    except KeyboardInterrupt:
        return ExitCode.INTERRUPTED
    return ExitCode.DONE


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
