"""`verl-credit doctor` prints the results of the checks of this machine and of a recipe's inputs."""

from __future__ import annotations

import json
from collections import Counter
from typing import Annotated

from omegaconf import DictConfig
from typer import Option

from verl_credit.cli.command import SHIPPED, AsJson, ConfigDir, Overrides
from verl_credit.errors import ConfigError, ExitCode
from verl_credit.recipe.doctor.result import Result, Status, failed, passed, skipped

SIGNS = {Status.PASS: "ok  ", Status.WARN: "warn", Status.FAIL: "FAIL", Status.SKIP: "-   "}


WORDS = {
    Status.FAIL: "failed",
    Status.WARN: "with a warning",
    Status.PASS: "passed",
    Status.SKIP: "not applicable",
}


def doctor(
    config_name: Annotated[str | None, Option(help=f"{SHIPPED}; none: the machine alone")] = None,
    config_dir: ConfigDir = None,
    as_json: AsJson = False,
    overrides: Overrides = (),
) -> ExitCode:
    """Exit code 4 when a check failed."""
    from verl_credit.recipe.doctor.checks import examine
    from verl_credit.recipe.doctor.context import Context
    from verl_credit.recipe.machine.gather import gather

    config, first = _recipe(config_name, overrides, config_dir)
    results = examine(Context(gather(), config), first=[first])
    failures = [r for r in results if r.status is Status.FAIL]
    if as_json:
        print(json.dumps({"passed": not failures, "checks": [r.as_dict() for r in results]}, indent=1))
    else:
        print("\n".join(page(results)))
    return ExitCode.PREFLIGHT if failures else ExitCode.DONE


def page(results: list[Result]) -> list[str]:
    width = max(len(r.name) for r in results)
    lines = []
    for result in results:
        lines.append(f"{SIGNS[result.status]}  {result.name:<{width}}  {result.found}")
        indent = " " * (width + 8)
        lines += [f"{indent}right: {result.right}"] if result.right else []
        lines += [f"{indent}fix:   {result.fix}"] if result.fix else []
    count = Counter(r.status for r in results)
    counts = ", ".join(f"{count[s]} {word}" for s, word in WORDS.items() if count[s])
    return [*lines, "", counts]


def _recipe(
    name: str | None, overrides: list[str], config_dir: str | None
) -> tuple[DictConfig | None, Result]:
    if name is None:
        if overrides:
            return None, failed(f"overrides without a recipe: {' '.join(overrides)}",
                                "a recipe that they belong to", "--config-name NAME", "recipe")  # fmt: skip
        why = "no recipe was given: the machine alone is looked at (--config-name NAME)"
        return None, skipped(why, "recipe")
    from verl_credit.recipe.compose import load_config

    try:
        config = load_config(name, overrides, config_dir)
    except ConfigError as error:
        right = "a recipe that `verl-credit explain` accepts"
        return None, failed(str(error), right, "fix that key", "recipe")
    device = f"{config.trainer.nnodes} x {config.trainer.n_gpus_per_node} {config.trainer.device}"
    return config, passed(f"{name}: {device}, rollouts by {config.actor_rollout_ref.rollout.name}", "recipe")
