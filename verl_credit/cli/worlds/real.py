"""`verl-credit real`: builds what a recipe with trained weights brings with it, without a run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from verl_credit.errors import ConfigError, ExitCode, PreflightError
from verl_credit.recipe.compose import load_config, quoted
from verl_credit.recipe.required import missing_line
from verl_credit.recipe.world import world_of
from verl_credit.records.run.progress import Throttled, say_at_once

RECIPES = {"multihop": "real_cpu", "arithmetic": "real_math_cpu"}


def real(folder: Path, task: str, more: Sequence[str] = (), **values: object) -> int:
    """``values``: of the keys ``real.*``; ``more``: other overrides of the recipe."""
    given = {"dir": str(folder.expanduser().resolve()), **values}
    overrides = [
        f"real.{key}={quoted(value) if isinstance(value, str) else value}"
        for key, value in given.items()
        if value is not None
    ]
    try:
        config = load_config(RECIPES[task], [*overrides, *more])
        if missing := missing_line(config):
            raise PreflightError(missing)
        world_of(config).build(Throttled(say_at_once, "real"))
    except (ConfigError, PreflightError) as error:
        print(f"verl-credit real --dir {folder}: {error}")
        return ExitCode.PREFLIGHT
    print(f"ready: {folder}")
    return ExitCode.DONE
