"""Recipes for tests: composed once for each choice of groups, then changed as Hydra changes them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack, contextmanager
from functools import cache, lru_cache
from io import StringIO
from pathlib import Path
from typing import IO, Any
from unittest import mock

import omegaconf.base
import yaml
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import Container, DictConfig, ListConfig, Node, OmegaConf, SCMode
from omegaconf.basecontainer import BaseContainer
from omegaconf.errors import InterpolationResolutionError

from verl_credit.errors import ConfigError
from verl_credit.recipe import compose

OWN = ["data.train_files=x", "data.val_files=x", "actor_rollout_ref.model.path=x", "search.url=http://x"]
GROUPS = (*compose.GROUPS, "credit")
MEASURED = "turn-group-v1d"
_load = OmegaConf.load
# Every recipe is composed of the same 24 files, with the same 150 interpolations.
yaml.SafeLoader = yaml.CSafeLoader
yaml.BaseLoader = yaml.CBaseLoader  # reports read a run's settings with it
omegaconf.base.parse = cache(omegaconf.base.parse)


def copied(node: Node, parent: Node | None = None) -> Node:
    """A deep copy of a configuration, ten times as fast as OmegaConf's: values are plain, and only containers have flags."""
    new = object.__new__(type(node))
    values = new.__dict__
    values.update(node.__dict__, _parent=parent, _flags_cache=None)
    content = values.get("_content")
    if isinstance(content, dict | list):
        metadata = object.__new__(type(node._metadata))
        metadata.__dict__.update(node._metadata.__dict__, flags=dict(node._metadata.flags or {}))
        values["_metadata"] = metadata
        if isinstance(content, dict):
            values["_content"] = {key: copied(child, new) for key, child in content.items()}
        else:
            values["_content"] = [copied(child, new) for child in content]
    return new


_slow = {container: container.__deepcopy__ for container in (DictConfig, ListConfig)}
for (
    _container
) in _slow:  # Hydra copies what it composes often, OmegaConf what it merges, and tests what they change
    _container.__deepcopy__ = lambda self, memo: copied(self, self.__dict__["_parent"])


@contextmanager
def omegaconfs_copies():
    with ExitStack() as stack:
        for container, deepcopy in _slow.items():
            stack.enter_context(mock.patch.object(container, "__deepcopy__", deepcopy))
        yield


_to_content = BaseContainer._to_content


def plain(
    conf: Container,
    resolve: bool,
    throw_on_missing=False,
    enum_to_str=False,
    structured_config_mode=SCMode.DICT,
) -> Any:
    """Replaces what ``to_container`` does, which takes two thirds of a check: only an interpolation is looked up."""
    content = conf.__dict__["_content"]
    options = throw_on_missing, enum_to_str, structured_config_mode
    if options != (False, False, SCMode.DICT) or not isinstance(content, dict | list):
        return _to_content(conf, resolve, *options)

    def value_of(key, node):
        if not isinstance(node, Container):
            value = node.__dict__["_val"]
            if not resolve or not isinstance(value, str) or "${" not in value:
                return value
            try:
                node = node._dereference_node()
            except InterpolationResolutionError as error:
                conf._format_and_raise(key=key, value=None, cause=error)
        return plain(node, resolve) if isinstance(node, Container) else node._value()

    if isinstance(content, dict):
        return {key: value_of(key, node) for key, node in content.items()}
    return [value_of(place, node) for place, node in enumerate(content)]


BaseContainer._to_content = staticmethod(plain)
_composed = cache(compose.compose_recipe)


def composed_once(name: str, overrides: Sequence[str], config_dir: str | None = None) -> DictConfig:
    """Replaces ``compose_recipe``, and is far faster: it changes keys as Hydra does, on a copy of what Hydra composed.

    A recipe that names no credit has `MEASURED` here, as most tests are about gains. A test of the default asks for auto.
    """
    groups = tuple(o for o in overrides if o.lstrip("+").partition("=")[0] in GROUPS)
    config = copied(_composed(name, groups, config_dir))
    changes = OverridesParser.create().parse_overrides([o for o in overrides if o not in groups])
    named, searches = (
        OmegaConf.select(config, key) for key in ("algorithm.info_gain_norm_mode", "search.max_searches")
    )
    if named == "auto" and searches:
        config.algorithm.info_gain_norm_mode = MEASURED
    ConfigLoaderImpl._apply_overrides_to_config(changes, config)
    return config


@lru_cache(maxsize=256)
def _read(text: str) -> DictConfig | ListConfig:
    return _load(StringIO(text))


def read_once(file: str | Path | IO) -> DictConfig | ListConfig:
    """Replaces ``OmegaConf.load``: a copy is thirty times as fast as reading the text of a recipe or a run again."""
    try:
        return copied(_read(file.read() if hasattr(file, "read") else Path(file).read_text(encoding="utf-8")))
    except Exception:  # what cannot be read has OmegaConf's own error, which names the file
        if hasattr(file, "seek"):
            file.seek(0)
        return _load(file)


def load_config(name: str, overrides: Sequence[str] = (), config_dir: str | None = None) -> DictConfig:
    """Composed, and not checked."""
    with mock.patch.object(compose, "compose_recipe", composed_once):
        return compose.unchecked_config(name, overrides, config_dir)


def check(*overrides: str, recipe: str = "lab") -> DictConfig:
    """Composed, and accepted."""
    with mock.patch.object(compose, "compose_recipe", composed_once):
        return compose.load_config(recipe, overrides)


def refused(*overrides: str, recipe: str = "lab") -> ConfigError:
    """The refusal of the recipe with these overrides."""
    try:
        check(*overrides, recipe=recipe)
    except ConfigError as error:
        return error
    raise AssertionError(f"{' '.join(overrides)} is accepted")
