"""The default of every key: verl's own value, or the value in recipes/credit_defaults.yaml."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import NamedTuple

from hydra import compose, initialize_config_dir
from omegaconf import DictConfig, OmegaConf

from verl_credit.config.keys import defaults_tree
from verl_credit.config.resolved import data, resolved
from verl_credit.recipe.compose import _quiet
from verl_credit.recipe.folders import recipes_folder, verl_folder

ABSENT = "(not there)"


class Default(NamedTuple):
    value: object
    of: str
    """"verl", or "verl_credit" for a key that verl does not have."""


@lru_cache(maxsize=1)
def defaults() -> dict[str, Default]:
    """Returns every default by its flattened key. Composing verl's ``ppo_trainer`` takes about a second."""
    with _quiet(), initialize_config_dir(str(verl_folder()), version_base=None):
        verl = flat_values(compose("ppo_trainer"))
    ours = OmegaConf.create((recipes_folder() / "credit_defaults.yaml").read_text(encoding="utf-8"))
    ours.pop("defaults")
    own = OmegaConf.merge(defaults_tree(), ours)
    own_defaults = {key: Default(value, "verl_credit") for key, value in flat_values(own).items()}
    return own_defaults | {key: Default(value, "verl") for key, value in verl.items()}


def flat_values(config: DictConfig) -> dict[str, object]:
    """Maps flattened keys to resolved values (a list is one value); "???" where a key or what it refers to has none."""
    flat: dict[str, object] = {}

    def walk(prefix: str, node: Mapping) -> None:
        for key, value in node.items():
            name = f"{prefix}.{key}" if prefix else str(key)
            if isinstance(value, dict) and value:
                walk(name, value)
            else:
                flat[name] = data(value)

    walk("", resolved(config, keep_missing=True))
    return flat


def changed_values(config: DictConfig) -> list[tuple[str, object, Default]]:
    """Returns (key, value, default) for every key whose value is not its default, in the recipe's order.

    Keys without a default (``lab.*`` and keys that a recipe adds) have the value ABSENT and belong to "the recipe".
    """
    known = defaults()
    absent = Default(ABSENT, "the recipe")
    rows = [(key, value, known.get(key, absent)) for key, value in flat_values(config).items()]
    return [(key, value, default) for key, value, default in rows if value != default.value]
