"""Recipes for tests: composed once for each choice of groups, then changed as Hydra changes them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import cache
from typing import Any
from unittest import mock

import omegaconf.base
import yaml
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.sources_registry import SourcesRegistry
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.plugins import Plugins
from omegaconf import DictConfig, ListConfig

from verl_credit.recipe import compose

OWN = ["data.train_files=x", "data.val_files=x", "actor_rollout_ref.model.path=x", "search.url=http://x"]
GROUPS = (*compose.GROUPS, "credit")
_compose = compose.compose_recipe
# Every recipe is composed of the same 24 files, with the same 150 interpolations.
yaml.SafeLoader = yaml.CSafeLoader
omegaconf.base.parse = cache(omegaconf.base.parse)
_files: dict[tuple, Any] = {}


def copied(node, parent=None):
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


@contextmanager
def read_once():
    """Hydra reads each file of verl and ours anew for each recipe, and copies it often; here a process reads it once."""
    Plugins.instance()  # registers the class that reads files
    source = SourcesRegistry.instance().resolve("file")
    load = source.load_config

    def load_config(self, config_path: str):
        path = os.path.join(self.path, self._normalize_file_name(config_path))
        if not os.path.exists(path):
            return load(self, config_path)
        status = os.stat(path)
        key = (self.path, self.provider, config_path, status.st_ino, status.st_mtime_ns, status.st_size)
        if key not in _files:
            _files[key] = load(self, config_path)
        result = _files[key]
        return replace(result, config=copied(result.config), header=dict(result.header))

    def deepcopy(self, memo):
        return copied(self, self.__dict__["_parent"])

    with mock.patch.object(source, "load_config", load_config), ExitStack() as stack:
        for container in (DictConfig, ListConfig):
            stack.enter_context(mock.patch.object(container, "__deepcopy__", deepcopy))
        yield


@cache
def _composed(name: str, groups: tuple[str, ...], config_dir: str | None) -> DictConfig:
    with read_once():
        return _compose(name, groups, config_dir)


def composed_once(name: str, overrides: Sequence[str], config_dir: str | None = None) -> DictConfig:
    """Replaces ``compose_recipe``, and is far faster: it changes keys as Hydra does, on a copy of what Hydra composed."""
    groups = tuple(o for o in overrides if o.lstrip("+").partition("=")[0] in GROUPS)
    config = copied(_composed(name, groups, config_dir))
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
