"""Reads a composed configuration: a dotted key, all values by their full names, and plain data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

MISSING = "???"
Tree = dict[str, Any]
"""A configuration as dicts and lists (`data`)."""
select = OmegaConf.select


def data(value: Any, *, resolve: bool = True) -> Any:
    """Returns a section or a list as dicts and lists, which can be stored or sent to other processes."""
    return OmegaConf.to_container(value, resolve=resolve) if OmegaConf.is_config(value) else value


def value_at(config: Mapping, key: str) -> Any:
    """`select`, also from a `Tree`: None for a key that is absent or has no value."""
    if isinstance(config, DictConfig):
        return select(config, key)
    node: Any = config
    for part in key.split("."):
        node = node.get(part) if isinstance(node, Mapping) else None
    return None if node == MISSING else node


def leaves(node: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields the full name and the value of everything in nested dicts and lists."""
    if isinstance(node, dict | list):
        for name, value in node.items() if isinstance(node, dict) else enumerate(node):
            yield from leaves(value, f"{prefix}.{name}" if prefix else str(name))
    else:
        yield prefix, node


def flat_values(section: DictConfig, prefix: str = "") -> dict[str, Any]:
    """Maps full names to resolved values (a list is one value); "???" where a key or what it refers to has none."""
    flat: dict[str, Any] = {}
    for name in section:
        key = f"{prefix}.{name!s}" if prefix else str(name)
        try:
            value = MISSING if OmegaConf.is_missing(section, name) else section[name]
            if isinstance(value, DictConfig) and value:
                flat |= flat_values(value, key)
            else:
                flat[key] = data(value)
        except OmegaConfBaseException:
            flat[key] = MISSING
    return flat
