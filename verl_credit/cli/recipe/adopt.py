"""`verl-credit adopt` makes a recipe with turn credit of a launch of verl's trainer. No program of the launch runs."""

import re
import shlex
from pathlib import Path
from typing import Annotated

import yaml
from typer import Option

from verl_credit.cli.command import Overrides, ends
from verl_credit.errors import ConfigError, ExitCode, printable


@ends("adopt")
def adopt(
    script: Annotated[str | None, Option("--from", help="a shell script that launches main_ppo")] = None,
    config: Annotated[str | None, Option("--config", help="a YAML on top of verl's ppo_trainer")] = None,
    launch: Annotated[
        int | None, Option(min=1, help="which launch of the script, where it has several")
    ] = None,
    write: Annotated[str | None, Option("--write", help="write the recipe into this YAML file")] = None,
    train: Annotated[
        bool, Option("--train", help="train where explain accepts it and nothing is lost")
    ] = False,
    entry: Annotated[str | None, Option("--entry", hidden=True)] = None,
    overrides: Overrides = (),
) -> int | None:
    """Exit code 0: `explain` accepts the result, which has all that decides the run; 3: something of that is lost, and the
    last line names it; 4: `explain` refuses the result, and says what to change."""
    from verl_credit.config.settings import CreditSettings
    from verl_credit.recipe.adopt.launch_files import read_launch
    from verl_credit.recipe.adopt.translate import RECIPE
    from verl_credit.recipe.adopt.translate import adopt as translate
    from verl_credit.recipe.compose import load_config
    from verl_credit.recipe.unread import without_effect

    file = None if write is None else new_yaml(write)
    if overrides and script is config is None and re.match(r"[^-+~][^=]*$", overrides[0]):  # adopt run.sh
        first, *overrides = overrides
        script, config = (None, first) if first.endswith((".yaml", ".yml")) else (first, None)
    given = read_launch(script, config, overrides, launch)
    given.entry = entry or given.entry
    found = translate(given.pairs, given.entry, given.unknown, given.chosen)
    name = script or config or "the overrides"
    lines = [f"{name}: {given.entry}, {len(given.pairs)} keys", *page(found, given)]
    print("\n".join(map(printable, lines)))
    options, effects = ["--config-name", RECIPE, *found.overrides()], []
    try:
        config = load_config(RECIPE, found.overrides())
        effects = without_effect(config, CreditSettings.from_config(config))
    except ConfigError as error:
        if not found.causes(error):
            print("\n" + shlex.join(["verl-credit", "explain", *options]))
            raise ConfigError(
                f"explain refuses the result: {error}", key=error.key, value=error.value
            ) from error
    if file is not None:
        options = written(file, name, found)
    print("\n" + shlex.join(["verl-credit", "explain", *options]))
    for line in effects:
        print(printable(f"without effect: {line}"))
    if found.lost:
        use = "; ".join(remedies(found))
        if file is not None:
            use += f"; {file} is written, and the next --write needs another name"
        print(
            printable(
                f"partial: this is another run than your launch, which lost {', '.join(found.lost)}; {use}"
            )
        )
        return ExitCode.PARTIAL
    if train:
        from verl_credit.cli.train.train import train as start

        return start(RECIPE, None, False, found.overrides())
    print("explain accepts it; `verl-credit doctor` checks files and machine, `verl-credit train` starts")
    return None


def new_yaml(write: str) -> Path:
    """The file of --write. Raises ConfigError for one that is there, before any work is done."""
    file = Path(write).expanduser()
    if file.suffix != ".yaml":
        raise ConfigError(key="--write", value=str(file), accepted="expected a name that ends in .yaml")
    if file.exists():
        use = "the file is there and stays as it is; give another name, or remove it"
        raise ConfigError(key="--write", value=str(file), accepted=use)
    return file


def remedies(found) -> list[str]:
    """What closes the gaps of a result, each kind of remedy once."""
    uses = []
    for name, why in found.lost.items():
        if name not in found.keyless:
            use = "give KEY=VALUE after --"
        elif name == "--config-name":
            use = "give the file: --config FILE"
        elif name.endswith(" of its defaults"):
            use = "put the file of its defaults beside the YAML"
        elif variable := getattr(why, "variable", ""):
            use = f"give the value of {variable} in the environment"
        else:
            use = f"no key closes {name}: correct it in the launch"
        uses.append(use)
    return list(dict.fromkeys(uses))


def page(found, given) -> list[str]:
    """What was translated, dropped and not known, with the reasons; keys with one reason stand together."""
    reasons: dict[str, list[str]] = {}
    for change in found.dropped:
        reasons.setdefault(change.why, []).append(change.old)
    parts = {
        "translated": [f"{f'{c.old} -> ' if c.old else ''}{c.new}   ({c.why})" for c in found.translated],
        "dropped": [f"{', '.join(keys)}   ({why})" for why, keys in reasons.items()],
        "not known, and left out": [f"{text}   ({why})" for text, why in given.unknown.items()],
        "notes": [*given.notes, *found.notes],
        "lost, and it decides the run": [f"{key}   ({why})" for key, why in found.lost.items()],
    }
    lines = []
    for title, rows in parts.items():
        lines += ["", title, *(f"  {row}" for row in rows)] if rows else []
    changed = {change.new.partition("=")[0] for change in found.translated}
    kept = sum(key not in changed for key in found.given)
    return [*lines, "", f"{kept} keys stay as they are"]


def written(file: Path, name: str, found) -> list[str]:
    """Writes the recipe. Returns the options that name it."""
    from verl_credit.recipe.adopt.translate import RECIPE

    chosen = [{f"override {group}": choice} for group, choice in found.choices().items()]
    tree = {"defaults": [RECIPE, *chosen, "_self_"], **found.tree()}
    text = yaml.safe_dump(tree, sort_keys=False, allow_unicode=True, width=120)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"# Adopted by `verl-credit adopt` from {printable(name)}.\n{text}", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--write {file}: {error.strerror}", key="--write", value=str(file)) from error
    return ["--config-dir", str(file.parent), "--config-name", file.stem]
