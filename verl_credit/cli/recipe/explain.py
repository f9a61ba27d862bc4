"""`verl-credit explain` describes the pipeline of a configuration without running it."""

from typing import Annotated

from typer import Option

from verl_credit.cli.command import SHIPPED, ConfigDir, Overrides, ends


@ends("explain: this would be refused")
def explain(
    config_name: Annotated[str, Option(help=SHIPPED)] = "lab",
    config_dir: ConfigDir = None,
    values: Annotated[bool, Option("--values", help="list every value that is not the default")] = False,
    overrides: Overrides = (),
) -> None:
    from verl_credit.cli.recipe.stages import explanation
    from verl_credit.recipe.compose import load_config

    print(explanation(config_name, load_config(config_name, overrides, config_dir), values))
