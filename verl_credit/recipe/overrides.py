"""Finds all overrides that Hydra would refuse, because Hydra names the first alone."""

from __future__ import annotations

from collections.abc import Sequence
from os.path import isdir  # pathlib raises OSError for a name that no file system takes
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import OverrideParseException
from omegaconf import DictConfig

from verl_credit.config.keys import place_of
from verl_credit.config.resolved import data
from verl_credit.errors import ConfigError, printable, unknown_key
from verl_credit.recipe.older_verl import remedy_of
from verl_credit.redact import redact_value


def unreadable(overrides: Sequence[str]) -> list[ConfigError]:
    """The refusals of overrides that Hydra cannot parse."""
    wrong = []
    for text in overrides:
        try:
            OverridesParser.create().parse_overrides([text])
        except OverrideParseException as error:
            key, equals, value = text.partition("=")
            if not equals and text.endswith((".yaml", ".yml")):
                file = Path(text)
                use = f"a recipe of yours is --config-dir {file.parent} --config-name {file.stem}"
                wrong.append(ConfigError(f"{text}: {use}", key=printable(text), accepted=use))
                continue
            reason = error.message.partition("\nSee ")[0].replace(text, "").rstrip(" ^\n:")
            use = f"Hydra cannot read that override ({reason}); quote the value"
            wrong.append(ConfigError(key=printable(key.lstrip("+~")), value=value, accepted=use))
    return wrong


def wrong_keys(base: DictConfig, overrides: Sequence[str], folders: Sequence[Path]) -> list[ConfigError]:
    """The refusals of overrides of keys that are not in ``base``, and of those with a + that are in it.

    ``folders``: where Hydra looks for groups, whose choice is no value.
    """
    tree, wrong, added = data(base, resolve=False), [], []
    for override in OverridesParser.create().parse_overrides(list(overrides)):
        key = override.key_or_group
        if any(isdir(folder / key) for folder in folders) or override.is_delete():
            continue
        there = _is_there(tree, key)
        if override.is_add() and there and not isinstance(override.value(), dict):
            use = f"the recipe has that key; write {key}={_value(override)}, without the +"
            wrong.append(ConfigError(key=key, value=_value(override), accepted=use))
        elif override.is_add() or override.is_force_add():
            added.append(key)
        elif not there and not any(f"{key}.".startswith(f"{new}.") for new in added):
            wrong.append(_unknown(tree, key, override))
    return wrong


def _unknown(tree: dict[str, Any], key: str, override: Override) -> ConfigError:
    value = _value(override)
    parent, node = "", tree
    for part in key.split("."):
        if not isinstance(node.get(part), dict):
            break
        parent, node = f"{parent}.{part}" if parent else part, node[part]
    below = key.removeprefix(f"{parent}.") if parent else key
    remedy = remedy_of(key) if node else f"+{key}={value}"  # an empty mapping takes any key
    return unknown_key(parent, below, map(str, node), value, place_of(below), remedy)


def _value(override: Override) -> str:
    return redact_value(override.key_or_group, str(override.input_line).partition("=")[2])


def _is_there(node: Any, key: str) -> bool:
    """Is the key in a configuration? A list's elements, and what an interpolation may hold, are not looked at."""
    for part in key.split("."):
        if not isinstance(node, dict):
            return isinstance(node, list) or "${" in str(node)
        if part not in node:
            return False
        node = node[part]
    return True
