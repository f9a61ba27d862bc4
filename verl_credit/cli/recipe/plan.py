"""`verl-credit plan` reads the command line and prints the plan."""

import json
from collections.abc import Sequence
from typing import Annotated

from omegaconf import OmegaConf
from typer import Option

from verl_credit.cli.command import SHIPPED, AsJson, ConfigDir, Overrides
from verl_credit.config.resolved import MISSING, flat_values
from verl_credit.errors import ConfigError, ExitCode

OURS = ("plan.", "hardware.")


def plan(
    config_name: Annotated[list[str], Option(help=f"{SHIPPED}; repeatable")] = ("lab",),
    config_dir: ConfigDir = None,
    every: Annotated[bool, Option("--all", help="every shipped recipe, as a table")] = False,
    hardware: Annotated[str | None, Option(help="h20, h100, h200, a100, gb10, cpu; docs/plan.md")] = None,
    devices: Annotated[int | None, Option(help="devices in all; the recipe's number otherwise")] = None,
    as_json: AsJson = False,
    overrides: Overrides = (),
) -> ExitCode:
    """Exit code 0: all recipes fit; 4: a recipe does not fit, or a named recipe cannot be planned. With ``every``, shipped
    recipes that need a key of yours (for example a model) are listed with the reason."""
    from verl_credit.recipe.compose import step_size_line
    from verl_credit.recipe.plan.plan import make_plan
    from verl_credit.recipe.plan.printed import HEADER, columns, line, text
    from verl_credit.recipe.plan.printed import as_json as plain
    from verl_credit.recipe.recipe_files import shipped_recipes

    names = shipped_recipes() if every else list(config_name)
    plans, sizes, refused = [], [], []
    for name in names:
        try:
            config = _load(name, overrides, config_dir)
            plans.append(make_plan(config, recipe=name, hardware=hardware, devices=devices))
            sizes.append(step_size_line(OmegaConf.create(config), name, overrides, config_dir))
        except ConfigError as error:
            refused.append((name, str(error)))
    several = every or len(names) > 1
    if as_json:
        entries = [*map(plain, plans), *({"recipe": name, "error": reason} for name, reason in refused)]
        print(json.dumps(entries if several else entries[0], indent=1))
    else:
        lines = columns([HEADER, *map(line, plans)]) if several and plans else [*map(text, plans), *sizes]
        if several:
            lines += dict.fromkeys(f"{plan.recipe}: {note}" for plan in plans for note in plan.notes)
        lines += [f"{name}: cannot be planned: {reason}" for name, reason in refused]
        print("\n".join(lines))
    failed = bool(refused) and (not every or not plans)
    return ExitCode.PREFLIGHT if failed or not all(plan.fits for plan in plans) else ExitCode.DONE


def _load(name: str, overrides: Sequence[str], config_dir: str | None = None) -> dict:
    """Composes a recipe, without the values that are missing; our own blocks may be set without being in the recipe."""
    from verl_credit.recipe.compose import load_config

    ours = [item for item in overrides if item.lstrip("+").startswith(OURS)]
    config = load_config(name, [item for item in overrides if item not in ours], config_dir)
    values = OmegaConf.create()
    for key, value in flat_values(config).items():
        if value != MISSING:
            OmegaConf.update(values, key, value)
    extra = OmegaConf.from_dotlist([item.lstrip("+") for item in ours])
    return OmegaConf.to_container(OmegaConf.merge(values, extra), resolve=True)
