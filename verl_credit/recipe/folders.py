"""The folders of recipes and of verl's own configuration."""

from __future__ import annotations

import importlib.util
from functools import cache
from pathlib import Path

from verl_credit.errors import ConfigError

RECIPES = "verl_credit_recipes"


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
    if spec is None:
        raise ConfigError(f"{package} is not installed: pip install 'verl-credit[verl]'")
    return Path(spec.submodule_search_locations[0]).resolve()


def shipped_recipes() -> list[str]:
    """The package's primary recipes, which start from verl's trainer."""
    files = recipes_folder().glob("*.yaml")
    return sorted(file.stem for file in files if "- ppo_trainer" in file.read_text(encoding="utf-8"))
