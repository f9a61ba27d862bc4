"""`verl-credit adopt` makes a recipe with turn credit of a launch of verl's trainer. Nothing of the launch is executed."""

import shlex
from pathlib import Path
from typing import Annotated

import yaml
from typer import Option

from verl_credit.cli.command import Overrides, ends
from verl_credit.errors import ConfigError, ExitCode, printable


@ends("adopt")
def adopt(
    script: Annotated[
        str | None, Option("--from", help="a shell script that launches verl.trainer.main_ppo")
    ] = None,
    config: Annotated[
        str | None, Option("--config", help="a YAML of yours on top of verl's ppo_trainer")
    ] = None,
    write: Annotated[str | None, Option("--write", help="write the recipe into this YAML file")] = None,
    overrides: Overrides = (),
) -> ExitCode:
    """Exit code 0: `explain` accepts the result; 4: it refuses, and says what to change."""
    from verl_credit.recipe.adopt.launch_files import read_launch
    from verl_credit.recipe.adopt.translate import RECIPE
    from verl_credit.recipe.adopt.translate import adopt as translate
    from verl_credit.recipe.compose import load_config

    given = read_launch(script, config, overrides)
    found = translate(given.pairs, given.entry)
    name = script or config or "the overrides"
    print(printable(f"{name}: {given.entry}, {len(given.pairs)} keys"))
    for line in page(found, given):
        print(printable(line))
    options = ["--config-name", RECIPE, *found.overrides()]
    if write is not None:
        options = written(Path(write).expanduser(), name, found)
    print("\n" + shlex.join(["verl-credit", "explain", *options]))
    try:
        load_config(RECIPE, found.overrides())
    except ConfigError as error:
        raise ConfigError(f"explain refuses the result: {error}", key=error.key, value=error.value) from error
    print("explain accepts it; `verl-credit doctor` checks files and machine, `verl-credit train` starts")
    return ExitCode.DONE


def page(found, given) -> list[str]:
    """What was translated, dropped and not known, with the reasons; keys with one reason stand together."""
    lines = []
    if found.translated:
        lines += ["", "translated"]
        lines += [f"  {f'{c.old} -> ' if c.old else ''}{c.new}   ({c.why})" for c in found.translated]
    if found.dropped:
        reasons: dict[str, list[str]] = {}
        for change in found.dropped:
            reasons.setdefault(change.why, []).append(change.old)
        lines += ["", "dropped"]
        lines += [f"  {', '.join(keys)}   ({why})" for why, keys in reasons.items()]
    if given.unknown:
        lines += ["", "not known, and left out"]
        lines += [f"  {text}   ({why})" for text, why in given.unknown.items()]
    if notes := [*given.notes, *found.notes]:
        lines += ["", "notes", *(f"  {note}" for note in notes)]
    changed = {change.new.partition("=")[0] for change in found.translated}
    kept = sum(key not in changed for key in found.given)
    return [*lines, "", f"{kept} keys stay as they are"]


def written(file: Path, name: str, found) -> list[str]:
    """Writes the recipe. Returns the options that name it. Raises ConfigError for a file that is there."""
    from verl_credit.recipe.adopt.translate import RECIPE

    if file.suffix != ".yaml" or file.exists():
        use = "expected the name of a new file that ends in .yaml"
        raise ConfigError(key="--write", value=str(file), accepted=use)
    chosen = [{f"override {group}": choice} for group, choice in found.choices().items()]
    tree = {"defaults": [RECIPE, *chosen, "_self_"], **found.tree()}
    text = yaml.safe_dump(tree, sort_keys=False, allow_unicode=True, width=120)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"# Adopted by `verl-credit adopt` from {printable(name)}.\n{text}", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--write {file}: {error.strerror}", key="--write", value=str(file)) from error
    return ["--config-dir", str(file.parent), "--config-name", file.stem]
