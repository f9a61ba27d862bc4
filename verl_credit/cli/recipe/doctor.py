"""`verl-credit doctor` prints the results of the checks of this machine and of a recipe's inputs."""

import json
from collections import Counter
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import asdict
from io import StringIO
from typing import TYPE_CHECKING, Annotated

from omegaconf import DictConfig
from typer import Option

from verl_credit.cli.command import SHIPPED, AsJson, ConfigDir, Overrides
from verl_credit.errors import ConfigError, ConfigErrors, ExitCode
from verl_credit.recipe.doctor.status import Result, Status, failed, passed, skipped

if TYPE_CHECKING:
    from verl_credit.recipe.doctor.context import Context

SIGNS = {
    Status.FAIL: ("FAIL", "failed"),
    Status.WARN: ("warn", "with a warning"),
    Status.PASS: ("ok  ", "passed"),
    Status.SKIP: ("-   ", "not applicable"),
}
"""The sign of a result's line, and the words of the count."""


def doctor(
    config_name: Annotated[str | None, Option(help=f"{SHIPPED}; none: the machine alone")] = None,
    config_dir: ConfigDir = None,
    as_json: AsJson = False,
    overrides: Overrides = (),
) -> ExitCode:
    """Exit code 4 when a check failed."""
    from verl_credit.recipe.doctor.checks import examine
    from verl_credit.recipe.doctor.context import Context
    from verl_credit.recipe.this_machine import gather

    config, first = _recipe(config_name, overrides, config_dir)
    results = examine(Context(gather(), config, _with_verl), first=first)
    failures = [r for r in results if r.status is Status.FAIL]
    code = ExitCode.PREFLIGHT if failures else ExitCode.DONE
    if as_json:
        print(json.dumps({"passed": not failures, "checks": [asdict(r) for r in results]}, indent=1))
        return code
    width = max(len(r.name) for r in results)
    for result in results:
        print(f"{SIGNS[result.status][0]}  {result.name:<{width}}  {result.found}")
        for title, text in (("right: ", result.right), ("fix:   ", result.fix)):
            if text:
                print(" " * (width + 8) + title + text)
    count = Counter(r.status for r in results)
    print("\n" + ", ".join(f"{count[s]} {words}" for s, (_, words) in SIGNS.items() if count[s]))
    return code


Recipe = tuple[DictConfig | None, list[Result]]


def _with_verl(name: str, context: "Context") -> Result:
    """Hides what verl prints while it is imported."""
    with redirect_stdout(StringIO()) as printed, redirect_stderr(printed):
        try:
            from verl_credit.cli.train.with_verl import check_with_verl, set_environment
        except ImportError as error:
            return failed(f"verl: {error}", "a verl that imports", "pip install 'verl-credit[verl]'")
        set_environment(context.recipe)
        return check_with_verl(name, context)


def _recipe(name: str | None, overrides: list[str], config_dir: str | None) -> Recipe:
    if name is None and overrides:
        given = f"overrides without a recipe: {' '.join(overrides)}"
        return None, [failed(given, "a recipe that they belong to", "--config-name NAME", "recipe")]
    if name is None:
        why = "no recipe was given: the machine alone is looked at (--config-name NAME)"
        return None, [skipped(why, "recipe")]
    from verl_credit.recipe.compose import load_config

    try:
        config = load_config(name, overrides, config_dir, may_fetch=True)
    except ConfigError as error:
        right = "a recipe that `verl-credit explain` accepts"
        several = error.errors if isinstance(error, ConfigErrors) else [error]
        return None, [failed(str(one), right, "fix that key", "recipe") for one in several]
    device = f"{config.trainer.nnodes} x {config.trainer.n_gpus_per_node} {config.trainer.device}"
    found = f"{name}: {device}, rollouts by {config.actor_rollout_ref.rollout.name}"
    return config, [passed(found, "recipe")]
