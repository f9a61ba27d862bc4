"""The folders of recipes and of verl's own configuration, and a user's YAML files, whose refusals name the line."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Sequence
from functools import cache
from os.path import isfile  # pathlib raises OSError for a name that no file system takes
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import MarkedYAMLError, YAMLError, safe_load

from verl_credit.errors import ConfigError, one_line

RECIPES = "verl_credit_recipes"
DEFAULTS = "credit_defaults"


def folders(config_dir: str | None) -> list[Path]:
    """The folders that are searched for recipes, the user's own first."""
    if config_dir is not None and not Path(config_dir).is_dir():
        raise ConfigError(f"--config-dir {config_dir} is not a directory")
    return [*([] if config_dir is None else [Path(config_dir).resolve()]), recipes_folder()]


def recipes_folder() -> Path:
    return _folder_of(RECIPES)


def verl_folder() -> Path:
    return _folder_of("verl") / "trainer" / "config"


@cache
def _folder_of(package: str) -> Path:
    """The folder of an installed package, without importing it."""
    spec = importlib.util.find_spec(package)
    if spec is None or spec.submodule_search_locations is None:
        raise ConfigError(f"{package} is not installed: pip install 'verl-credit[verl]'")
    return Path(spec.submodule_search_locations[0]).resolve()


def shipped_recipes() -> list[str]:
    """The package's primary recipes, which start from verl's trainer."""
    files = recipes_folder().glob("*.yaml")
    return sorted(file.stem for file in files if "- ppo_trainer" in file.read_text(encoding="utf-8"))


def read_tree(path: Path) -> Any:
    """Reads the file without interpolation. Raises ConfigError, also for a key that is in the file twice."""
    try:
        return OmegaConf.to_container(OmegaConf.load(path), resolve=False)
    except YAMLError as error:
        raise not_yaml(error) from error
    except (OSError, UnicodeDecodeError, OmegaConfBaseException, RecursionError) as error:
        raise ConfigError(f"{path} cannot be read: {one_line(str(error))}") from error


def not_yaml(error: YAMLError) -> ConfigError:
    """The error ``FILE, line 3: YAML's message``."""
    begun = error.context_mark if isinstance(error, MarkedYAMLError) else None
    mark = (error.problem_mark or begun) if isinstance(error, MarkedYAMLError) else None
    if not isinstance(error, MarkedYAMLError) or mark is None:
        return ConfigError(" ".join(str(error).split()))
    since = hint = ""
    if begun and begun.line != mark.line:
        since = f" ({error.context} that begins in line {begun.line + 1})"
    file = Path(mark.name)
    lines = file.read_text(encoding="utf-8").splitlines() if file.is_file() else []
    if mark.line < len(lines) and lines[mark.line][: mark.column + 1].endswith("\t"):
        hint = "; indent with spaces, not with a tab"
    return ConfigError(f"{mark.name}, line {mark.line + 1}: {error.problem}{since}{hint}", key=mark.name)


def circle(name: str, folders: Sequence[Path]) -> ConfigError:
    """The error for ``defaults`` of ``name`` that lead back to a recipe that is being read."""

    def walk(path: str, above: tuple[str, ...]) -> tuple[Path, str] | None:
        file = next((f / f"{path}.yaml" for f in folders if isfile(f / f"{path}.yaml")), None)
        if file is None:
            return None
        group = path.rpartition("/")[0]
        for entry in _listed(file):
            below = entry.removeprefix("/") if entry.startswith("/") or not group else f"{group}/{entry}"
            place = (file, entry) if below in (*above, path) else walk(below, (*above, path))
            if place:
                return place
        return None

    place = walk(name.removesuffix(".yaml"), ())
    if place is None:
        return ConfigError(
            f"recipe {name}: values are nested too deeply, or they or the defaults lead back to themselves",
            key="defaults",
        )
    file, entry = place
    lines = file.read_text(encoding="utf-8").splitlines()
    word = re.compile(rf"(?<![\w/]){re.escape(entry)}(?![\w/])")
    number = next((n for n, line in enumerate(lines, 1) if word.search(line.partition("#")[0])), 1)
    fault = f"defaults list {entry!r}, which leads back to this file; list another recipe"
    message = f"{file}, line {number}: {fault}"
    return ConfigError(message, key="defaults", value=entry)


def lists_ours(name: str, folders: Sequence[Path]) -> bool:
    """Does the file of this name, or one that its defaults list, start from our defaults?"""
    seen: set[str] = set()

    def walk(path: str) -> bool:
        file = next((f / f"{path}.yaml" for f in folders if isfile(f / f"{path}.yaml")), None)
        if path == DEFAULTS or file is None or path in seen:
            return path == DEFAULTS
        seen.add(path)
        return any(walk(entry.removeprefix("/")) for entry in _listed(file))

    return walk(name.removesuffix(".yaml"))


def _listed(file: Path) -> list[str]:
    """Returns the names in the file's ``defaults``, groups as GROUP/CHOICE."""
    names = []
    try:
        tree = safe_load(file.read_text(encoding="utf-8")) or {}
    except RecursionError as error:
        raise ConfigError(f"{file} cannot be read: it is nested too deeply") from error
    for entry in tree.get("defaults") or []:
        pairs = entry.items() if isinstance(entry, dict) else [(None, entry)]
        for group, choice in pairs:
            group = re.sub(r"^(override|optional)\s+", "", group).partition("@")[0] if group else None
            names.append(f"{group}/{choice}" if group else str(choice).partition("@")[0])
    return [name for name in names if name != "_self_"]
