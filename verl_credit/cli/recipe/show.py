"""`verl-credit explain` describes a configuration's pipeline, and `verl-credit diff A B` compares two runs or recipes."""

import json
from typing import Annotated

from typer import Argument, Option

from verl_credit.cli.command import SHIPPED, AsJson, ConfigDir, Overrides, ends
from verl_credit.errors import ExitCode


@ends("explain: this would be refused")
def explain(
    config_name: Annotated[str, Option(help=SHIPPED)] = "lab",
    config_dir: ConfigDir = None,
    values: Annotated[bool, Option("--values", help="list every value that is not the default")] = False,
    overrides: Overrides = (),
) -> None:
    from verl_credit.cli.recipe.stages import explanation
    from verl_credit.recipe.compose import load_config, step_size_line

    config = load_config(config_name, overrides, config_dir)
    size = step_size_line(config, config_name, overrides, config_dir)
    print(explanation(config_name, config, values, size))


@ends("diff", ValueError, OSError)
def diff(
    a: Annotated[str, Argument(help="a run's folder, or a recipe with overrides: 'lab credit=grpo'")],
    b: Annotated[str, Argument(help="the same")],
    config_dir: ConfigDir = None,
    as_json: AsJson = False,
) -> ExitCode:
    """Exit code 0: equal; 1: different; 4: A or B cannot be read."""
    from verl_credit.cli.recipe.differences import as_data, compare, count, page, read_side

    sides = read_side(a, config_dir), read_side(b, config_dir)
    found = compare(*sides)
    text = (
        json.dumps(as_data(*sides, found), indent=1, default=str)
        if as_json
        else "\n".join(page(*sides, found))
    )
    print(text)
    return ExitCode.DIFFERENT if count(found) else ExitCode.DONE
