"""Refuses a module's old place (`names.MOVED`) in a value, or in a file that a value names, with the new place.

Without this, verl would raise ModuleNotFoundError in the middle of a start or in a worker. Our own loader of plug-ins
refuses old places itself (`credit/plugins/load.py`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml

from verl_credit.config.resolved import leaves
from verl_credit.errors import ConfigError
from verl_credit.names import place_now
from verl_credit.recipe.agent_loops import LISTED, TOOLS
from verl_credit.recipe.rules.own import MODULES

PLACE = re.compile(r"(pkg://)?[\w.:]+")
CLASSES = ("_target_", "class_name")
"""The keys that name a class in the files of agent loops and tools."""


def validate_places(values: Iterable[tuple[str, Any]]) -> None:
    """Raises ConfigError for an old place. ``values``: the full names and values of a configuration."""
    for key, value in values:
        if not isinstance(value, str):
            continue
        _refuse(key, value, value)
        if value.endswith(".py"):
            _imports(key, value, Path(value))
        if key in (LISTED, TOOLS):
            content = None
            with suppress(OSError, UnicodeDecodeError, yaml.YAMLError):  # refused where the file is read
                content = yaml.safe_load(Path(value).expanduser().read_text(encoding="utf-8"))
            for name, place in leaves(content):
                if name.rpartition(".")[2] in CLASSES and isinstance(place, str):
                    _refuse(key, value, place)
                    _module(key, value, place.rpartition(".")[0])
        if key.startswith(MODULES):
            _module(key, value, value)


def _refuse(key: str, value: str, place: str) -> None:
    now = place_now(place)
    if now != place and PLACE.fullmatch(place):
        if value == place:
            raise ConfigError(key=key, value=value, accepted=[now])
        raise ConfigError(f"{key}={value}: {place} in it is {now} now", key=key, value=value, accepted=[now])


def _module(key: str, value: str, module: str) -> None:
    file = None
    with suppress(ImportError, ValueError, AttributeError):  # verl reports why it cannot be imported
        file = getattr(find_spec(module), "origin", None)
    if file is not None and file.endswith(".py"):
        _imports(key, value, Path(file))


def _imports(key: str, value: str, file: Path) -> None:
    with suppress(OSError, UnicodeDecodeError):
        for number, line in enumerate(file.expanduser().read_text(encoding="utf-8").splitlines(), 1):
            if re.match(r"\s*(from|import)\s", line) and (now := place_now(line)) != line:
                message = f"{key}={value}: {file}, line {number} imports an old place; write {now.strip()}"
                raise ConfigError(message, key=key, value=value, accepted=[now.strip()])
