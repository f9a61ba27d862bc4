"""Where Hydra finds the recipes' files and verl's, and how it reads them: by libyaml, five times as fast as in Python.

A user's files are read in Python. libyaml ends the process where a file is nested tens of thousands deep; Python refuses it.
"""

from __future__ import annotations

import os
from functools import cache

import yaml
from hydra._internal.core_plugins.file_config_source import FileConfigSource
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.plugins import Plugins
from hydra.plugins.config_source import ConfigResult, ConfigSource
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import DictConfig, Node, OmegaConf
from omegaconf._utils import get_yaml_loader

from verl_credit.recipe.files import RECIPES, recipes_folder, verl_folder

SCHEME = "packaged"


class PackagedSource(FileConfigSource):
    """Reads a file as Hydra's own class for files does."""

    @staticmethod
    def scheme() -> str:
        return SCHEME

    def load_config(self, config_path: str) -> ConfigResult:
        path = os.path.join(self.path, self._normalize_file_name(config_path))
        config, header = _read(path, os.stat(path).st_mtime_ns)
        return ConfigResult(self.provider, f"{SCHEME}://{self.path}", copied(config), dict(header))


@cache
def _read(path: str, _changed: int) -> tuple[DictConfig, dict[str, str]]:
    """A recipe and verl's defaults, with which it is compared, are composed of the same files."""
    with open(path, encoding="utf-8") as file:
        header = ConfigSource._get_header_dict(file.read(512))
        file.seek(0)
        return OmegaConf.create(yaml.load(file, LOADER) or {}), header


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


def _loader() -> type:
    """OmegaConf's loader of YAML with libyaml's parser, where PyYAML has it."""
    ours = get_yaml_loader()
    if not yaml.__with_libyaml__:
        return ours

    class Loader(yaml.cyaml.CParser, ours):
        def __init__(self, stream):
            yaml.cyaml.CParser.__init__(self, stream)
            yaml.constructor.SafeConstructor.__init__(self)
            yaml.resolver.Resolver.__init__(self)

    return Loader


LOADER = _loader()


class SearchPath(SearchPathPlugin):
    """Adds the shipped recipes and verl's configuration to the folders where a recipe's parts are searched.

    verl's folder is a path, because ``pkg://verl.trainer.config`` would import verl, which takes several seconds.
    """

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        packaged = {RECIPES: str(recipes_folder()), "verl": str(verl_folder())}
        for element in search_path.get_path():
            if element.path in packaged.values():  # the folder that Hydra was started with
                element.path = f"{SCHEME}://{element.path}"
        for provider, folder in packaged.items():
            search_path.append(provider, f"{SCHEME}://{folder}")


def register() -> None:
    for plugin in (PackagedSource, SearchPath):
        Plugins.instance().register(plugin)
