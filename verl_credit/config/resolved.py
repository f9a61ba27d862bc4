"""Resolves a configuration's interpolations once, into plain data that is read as fast as a dict.

OmegaConf parses an interpolation anew at every access, about .3 ms, and verl's configuration has a hundred. Nearly all
of them name one other key, ``${a.b}`` or ``${oc.select:a.b,default}`` where that key exists: these are looked up here.
OmegaConf resolves every other one.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import reduce
from typing import Any

from omegaconf import DictConfig, Node, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from verl_credit.errors import ConfigError

MISSING = "???"
_DEFAULT = r"(?:,(?:[^{}$]|\$\{[^{}$]*\})*)?"
_REFERENCE = re.compile(r"\$\{(?:(\w[\w.]*)|oc\.select:(\w[\w.]*)" + _DEFAULT + r")\}")


class Tree(dict):
    """A resolved section. Its keys are also attributes; a key whose value is missing (``???``) is absent.

    Reading an absent key raises ConfigError with the full name of the key.
    """

    __slots__ = ("_full_name",)

    def __init__(self, full_name: str, values: Mapping[str, Any]) -> None:
        super().__init__(values)
        self._full_name = full_name

    def __missing__(self, name: str) -> Any:
        key = f"{self._full_name}.{name}" if self._full_name else name
        raise ConfigError(f"{key} has no value", key=key)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # Python's protocols look these up
            raise AttributeError(name)
        return self[name]


Config = DictConfig | Tree
"""The configuration of functions that are called before the start with the resolved tree, and in a run with verl's own."""


def select(config: Config, key: str, default: Any = None) -> Any:
    """The value of a dotted key; ``default`` where the key is absent or its value is missing."""
    if isinstance(config, DictConfig):
        return OmegaConf.select(config, key, default=default)
    node: Any = config
    for part in key.split("."):
        if not isinstance(node, Mapping) or part not in node:
            return default
        node = node[part]
    return node


def data(value: Any) -> Any:
    """Converts a value of either kind to dicts and lists, which can be stored or sent to other processes."""
    if OmegaConf.is_config(value):
        return OmegaConf.to_container(value, resolve=True)
    if isinstance(value, dict):
        return {name: data(one) for name, one in value.items()}
    return [data(one) for one in value] if isinstance(value, list) else value


def leaves(node: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields the full name and the value of everything in nested dicts and lists."""
    if isinstance(node, dict | list):
        for name, value in node.items() if isinstance(node, dict) else enumerate(node):
            yield from leaves(value, f"{prefix}.{name}" if prefix else str(name))
    else:
        yield prefix, node


def written(config: DictConfig) -> dict[str, Any]:
    """Returns the configuration as plain data, with interpolations unresolved: OmegaConf's `to_container`, but much
    faster, because a configuration that is composed of YAML has no other nodes than these."""

    def plain(node: Node) -> Any:
        content = node._value()
        if isinstance(content, dict):
            return {name: plain(one) for name, one in content.items()}
        return [plain(one) for one in content] if isinstance(content, list) else content

    return plain(config)


def resolved(
    config: DictConfig, plain: Mapping[str, Any] | None = None, *, keep_missing: bool = False
) -> Tree:
    """Resolves a configuration. ``plain``: its `written` form. Raises OmegaConf's error where an interpolation has no value.

    ``keep_missing``: a key without a value has the value ``???`` in place of an error, and no key is left out.
    """
    plain = written(config) if plain is None else plain

    def value(path: tuple[str | int, ...], node: Any) -> Any:
        if isinstance(node, dict):
            below = {
                name: value((*path, name), one)
                for name, one in node.items()
                if keep_missing or one != MISSING
            }
            return Tree(".".join(map(str, path)), below)
        if isinstance(node, list):
            return [value((*path, place), one) for place, one in enumerate(node)]
        if not isinstance(node, str) or "${" not in node:
            return node
        target = _target(plain, node)
        if target is not None:
            return value(*target)
        try:
            found = reduce(lambda parent, name: parent[name], path, config)
            return value(path, data(found)) if OmegaConf.is_config(found) else found
        except OmegaConfBaseException:
            if keep_missing:
                return MISSING
            raise

    try:
        return value((), plain)
    except RecursionError:
        OmegaConf.to_container(config, resolve=True)  # its error names the key that refers back to itself
        raise


def _target(plain: Mapping[str, Any], text: str) -> tuple[tuple[str, ...], Any] | None:
    """Returns the path and node that an interpolation names; None where OmegaConf has to resolve it."""
    match = _REFERENCE.fullmatch(text)
    if match is None:
        return None
    path, node = tuple((match[1] or match[2]).split(".")), plain
    for part in path:
        if not isinstance(node, dict) or part not in node:
            return None
        node = node[part]
    return None if node == MISSING else (path, node)
