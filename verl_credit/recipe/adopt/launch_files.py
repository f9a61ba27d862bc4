"""The keys that a launch of verl gives: a YAML, a shell script and overrides, in this order."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from verl_credit.errors import ConfigError
from verl_credit.recipe import recipe_files as files
from verl_credit.recipe.adopt.adoption import NULL, as_text
from verl_credit.recipe.adopt.script import MAIN, read_script
from verl_credit.recipe.older_verl import MEGATRON

OPTIONS = {
    "--config-path": "path",
    "-cp": "path",
    "--config-dir": "path",
    "-cd": "path",
    "--config-name": "name",
    "-cn": "name",
}
BASE, OTHER_BASES = "ppo_trainer", ("ppo_megatron_trainer", "ppo_veomni_trainer", "ppo_torchtitan_trainer")


@dataclass
class Given:
    entry: str = MAIN
    pairs: list[tuple[str, str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    unknown: dict[str, str] = field(default_factory=dict)
    """An argument as the script writes it, and why its value is not known."""


def read_launch(
    script: str | None, config: str | None, overrides: Sequence[str], number: int | None = None
) -> Given:
    """``number``: which launch of the script, where it has several.

    Raises ConfigError for a file that cannot be read, a script without a launch, and an argument that is no key=value.
    """
    given = Given()
    if not (script or config or overrides):
        use = "give the overrides after --, a script (--from run.sh) or a YAML (--config my.yaml)"
        raise ConfigError(f"nothing to adopt: {use}")
    if config is not None:
        _add_yaml(given, Path(config).expanduser())
    if script is not None:
        launch = read_script(script, {"PWD": os.getcwd(), **os.environ}, number)
        given.entry, given.unknown = launch.entry, launch.unknown
        given.notes += launch.notes
        _add_arguments(given, launch.arguments)
    _add_arguments(given, overrides)
    return given


def _add_arguments(given: Given, arguments: Sequence[str]) -> None:
    """Hydra's options and overrides. A YAML that an option names stands below the overrides."""
    options, pairs, rest = {"path": "", "name": ""}, [], iter(arguments)
    for text in rest:
        option, equals, value = text.partition("=")
        if option in OPTIONS:
            options[OPTIONS[option]] = value if equals else next(rest, "")
        elif text.startswith("~"):
            given.notes.append(f"{text}: a key is not taken away here; verl's default stays")
        elif not equals or text.startswith("-"):
            if not text.startswith("-"):
                use = "expected KEY=VALUE, as verl.trainer.main_ppo takes it"
                raise ConfigError(f"{text!r}: {use}", key=text, accepted=use)
            given.notes.append(f"{text}: an option of Hydra that verl-credit does not have")
        else:
            pairs.append((option.lstrip("+"), value))
    _add_named(given, **options)
    given.pairs += pairs


def _add_named(given: Given, path: str, name: str) -> None:
    stem = name.removesuffix(".yaml")
    if stem in ("", BASE):
        return
    if stem in OTHER_BASES:
        why = MEGATRON if "megatron" in stem else "the turns are built for verl's FSDP engine"
        given.notes.append(f"--config-name={name}: {BASE} instead: {why}")
        return
    file = Path(path, f"{stem}.yaml")
    if file.is_file():
        _add_yaml(given, file)
    else:
        given.notes.append(
            f"--config-name={name}: {file} is not there; its keys are missing here (give it: --config FILE)"
        )


def _add_yaml(given: Given, file: Path) -> None:
    tree = files.read_tree(file)
    if not isinstance(tree, Mapping):
        raise ConfigError(f"{file}: expected keys of verl.trainer.main_ppo", key="--config", value=str(file))
    for entry in tree.get("defaults") or []:
        name = entry if isinstance(entry, str) else None
        if name in OTHER_BASES:
            given.notes.append(f"{file}: {BASE} instead of {name}: {MEGATRON}")
        elif name not in (BASE, "_self_"):
            text = entry if name else ", ".join(f"{key}: {value}" for key, value in entry.items())
            given.notes.append(f"{file}: its defaults list {text}, whose keys are missing here")
    given.pairs += _flat({key: value for key, value in tree.items() if key not in ("defaults", "hydra")})


def _flat(node: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for name, value in node.items():
        key = f"{prefix}.{name}" if prefix else str(name)
        if isinstance(value, Mapping) and value:
            yield from _flat(value, key)
        elif not (value is None and re.search(r"\.", key) is None):
            yield key, NULL if value is None else as_text(value)
