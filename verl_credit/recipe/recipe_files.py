"""The folders of recipes and of verl's own configuration, and a user's YAML files, whose refusals name the line."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator, Sequence
from functools import cache
from linecache import getline
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
    mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    if not isinstance(error, MarkedYAMLError) or mark is None:
        return ConfigError(" ".join(str(error).split()))
    begun, since = error.context_mark, ""
    if begun and begun.line != mark.line:
        since = f" ({error.context} that begins in line {begun.line + 1})"
    if getline(mark.name, mark.line + 1)[mark.column : mark.column + 1] == "\t":
        since += "; indent with spaces, not with a tab"
    return ConfigError(f"{mark.name}, line {mark.line + 1}: {error.problem}{since}", key=mark.name)


def circle(name: str, folders: Sequence[Path]) -> ConfigError:
    """The error for ``defaults`` of ``name`` that lead back to a recipe that is being read."""
    for file, entry, below, above in _entries(name.removesuffix(".yaml"), folders):
        if below in above:
            lines = file.read_text(encoding="utf-8").splitlines()
            word = re.compile(rf"(?<![\w/]){re.escape(entry)}(?![\w/])")
            number = next((n for n, line in enumerate(lines, 1) if word.search(line.partition("#")[0])), 1)
            fault = f"defaults list {entry!r}, which leads back to this file; list another recipe"
            return ConfigError(f"{file}, line {number}: {fault}", key="defaults", value=entry)
    why = "values are nested too deeply, or they or the defaults lead back to themselves"
    return ConfigError(f"recipe {name}: {why}", key="defaults")


def lists_ours(name: str, folders: Sequence[Path]) -> bool:
    """Does the file of this name, or one that its defaults list, start from our defaults?"""
    name = name.removesuffix(".yaml")
    return name == DEFAULTS or any(below == DEFAULTS for _, _, below, _ in _entries(name, folders))


Entry = tuple[Path, str, str, tuple[str, ...]]


def _entries(path: str, folders: Sequence[Path], above: tuple[str, ...] = ()) -> Iterator[Entry]:
    """Yields (file, entry, path of the entry's file, paths above it) for all ``defaults`` of a file and of those below."""
    file = next((f / f"{path}.yaml" for f in folders if isfile(f / f"{path}.yaml")), None)
    group, above = path.rpartition("/")[0], (*above, path)
    if file is None:
        return
    for entry in _listed(file):
        below = entry.removeprefix("/") if entry.startswith("/") or not group else f"{group}/{entry}"
        yield file, entry, below, above
        if below not in above:
            yield from _entries(below, folders, above)


def _listed(file: Path) -> list[str]:
    """Returns the names in the file's ``defaults``, groups as GROUP/CHOICE."""
    try:
        tree = safe_load(file.read_text(encoding="utf-8")) or {}
    except RecursionError as error:
        raise ConfigError(f"{file} cannot be read: it is nested too deeply") from error
    names = []
    for entry in tree.get("defaults") or []:
        for group, choice in entry.items() if isinstance(entry, dict) else [("", entry)]:
            group = re.sub(r"^(override|optional)\s+", "", group).partition("@")[0]
            names.append(f"{group}/{choice}" if group else str(choice).partition("@")[0])
    return [name for name in names if name != "_self_"]
