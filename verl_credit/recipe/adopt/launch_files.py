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
from verl_credit.recipe.adopt.adoption import NULL, as_text, key_of, value_of
from verl_credit.recipe.adopt.entry import MAIN, note_of
from verl_credit.recipe.adopt.script import read_script
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
    chosen: set[str] = field(default_factory=set)
    """The keys of overrides that are given beside a script or a YAML."""


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
        given.entry = launch.entry
        given.unknown |= launch.unknown
        given.notes += [*note_of(launch.entry), *launch.notes]
        _add_arguments(given, launch.arguments)
        _twice(given)
    wrong = [name for name in given.unknown if not name.startswith("-")]
    open_keys = {key_of(name): name for name in wrong if "=" in name}
    given.pairs = [(key, text) for key, text in given.pairs if key not in open_keys]
    before = len(given.pairs)
    _add_arguments(given, overrides)
    if script or config:
        given.chosen = {key for key, _ in given.pairs[before:]}
        for key in given.chosen & {*open_keys}:
            del given.unknown[open_keys[key]]
    for key, text in given.pairs:
        if "," in text:
            value_of(key, text)  # refuses a sweep
    return given


def _twice(given: Given) -> None:
    """Notes the keys that the launch gives twice, as an unquoted {a,b} does."""
    last = dict(given.pairs)
    for key in dict.fromkeys(key for key, text in given.pairs if text != last[key]):
        values = [text for other, text in given.pairs if other == key]
        given.notes.append(f"{key} is given {len(values)} times ({', '.join(values)}); the last one counts")


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
    file = Path(path, f"{stem}.yaml")
    if not stem or (stem == BASE and not (path and file.is_file())):
        return
    if stem in OTHER_BASES:
        why = MEGATRON if "megatron" in stem else "the turns are built for verl's FSDP engine"
        given.notes.append(f"--config-name={name}: {BASE} instead: {why}")
        return
    if file.is_file():
        _add_yaml(given, file)
    elif not given.pairs:  # else --config has given it
        why = f"{file} is not there, and its keys are missing here; give it: --config FILE"
        given.unknown[f"--config-name={name}"] = why


def _add_yaml(given: Given, file: Path) -> None:
    tree = files.read_tree(file)
    if not isinstance(tree, Mapping):
        raise ConfigError(f"{file}: expected keys of verl.trainer.main_ppo", key="--config", value=str(file))
    for entry in tree.get("defaults") or []:
        name = entry if isinstance(entry, str) else None
        if name in OTHER_BASES:
            given.notes.append(f"{file}: {BASE} instead of {name}: {MEGATRON}")
        elif (
            name
            and name not in (BASE, "_self_", file.stem)
            and (part := file.with_name(f"{name}.yaml")).is_file()
        ):
            _add_yaml(given, part)
        elif name not in (BASE, "_self_") and not _verls_part(entry):
            text = entry if name else ", ".join(f"{key}: {value}" for key, value in entry.items())
            given.unknown[f"{file}: {text} of its defaults"] = "its keys are missing here"
    given.pairs += _flat({key: value for key, value in tree.items() if key not in ("defaults", "hydra")})


def _verls_part(entry: Any) -> bool:
    """Is it a group of verl's own configuration, as a copy of ppo_trainer.yaml lists them?"""
    names = [*entry] if isinstance(entry, dict) else []
    groups = [str(name).removeprefix("optional ").partition("@")[0] for name in names]
    folder = files.verl_folder()
    return bool(groups) and all(one == "model_engine" or (folder / one).is_dir() for one in groups)


def _flat(node: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for name, value in node.items():
        key = f"{prefix}.{name}" if prefix else str(name)
        if isinstance(value, Mapping) and value:
            yield from _flat(value, key)
        elif not (value is None and re.search(r"\.", key) is None):
            yield key, NULL if value is None else as_text(value)
