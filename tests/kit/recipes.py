"""Recipes for tests: composed once for each choice of groups, then changed as Hydra changes them."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from functools import cache
from unittest import mock

import omegaconf.base
import yaml
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig

from verl_credit.recipe import compose

OWN = ["data.train_files=x", "data.val_files=x", "actor_rollout_ref.model.path=x", "search.url=http://x"]
GROUPS = (*compose.GROUPS, "credit")
_compose = compose.compose_recipe
# Every recipe is composed of the same 24 files, with the same 150 interpolations.
yaml.SafeLoader = yaml.CSafeLoader
omegaconf.base.parse = cache(omegaconf.base.parse)


@cache
def _composed(name: str, groups: tuple[str, ...], config_dir: str | None) -> bytes:
    return pickle.dumps(_compose(name, groups, config_dir))


def composed_once(name: str, overrides: Sequence[str], config_dir: str | None = None) -> DictConfig:
    """In place of ``compose_recipe``, ten times as fast: Hydra's own way of changing keys, on a copy of what it composed."""
    groups = tuple(o for o in overrides if o.lstrip("+").partition("=")[0] in GROUPS)
    config = pickle.loads(_composed(name, groups, config_dir))
    changes = OverridesParser.create().parse_overrides([o for o in overrides if o not in groups])
    ConfigLoaderImpl._apply_overrides_to_config(changes, config)
    return config


def load_config(name: str, overrides: Sequence[str] = (), config_dir: str | None = None) -> DictConfig:
    """Composed, and not checked."""
    with mock.patch.object(compose, "compose_recipe", composed_once):
        return compose.unchecked_config(name, overrides, config_dir)


def check(*overrides: str, recipe: str = "lab") -> DictConfig:
    """Composed, and accepted."""
    with mock.patch.object(compose, "compose_recipe", composed_once):
        return compose.load_config(recipe, overrides)
