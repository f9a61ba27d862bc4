"""Reads a user's YAML files as plain data; refusals name the file, the line and the fault."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import Mark, YAMLError, safe_load

from verl_credit.errors import ConfigError, one_line


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
    if mark is None:
        return ConfigError(" ".join(str(error).split()))
    begun = getattr(error, "context_mark", None)
    since = (
        f" ({error.context} that begins in line {begun.line + 1})"
        if begun and begun.line != mark.line
        else ""
    )
    hint = "; indent with spaces, not with a tab" if _indented_by_tab(mark) else ""
    return ConfigError(f"{mark.name}, line {mark.line + 1}: {error.problem}{since}{hint}", key=mark.name)


def _indented_by_tab(mark: Mark) -> bool:
    lines = Path(mark.name).read_text(encoding="utf-8").splitlines() if Path(mark.name).is_file() else []
    return mark.line < len(lines) and lines[mark.line][: mark.column + 1].endswith("\t")


def circle(name: str, folders: Sequence[Path]) -> ConfigError:
    """The error for ``defaults`` of ``name`` that lead back to a recipe that is being read."""

    def walk(path: str, above: tuple[str, ...]) -> tuple[Path, str] | None:
        file = next((f / f"{path}.yaml" for f in folders if (f / f"{path}.yaml").is_file()), None)
        group = path.rpartition("/")[0]
        for entry in _listed(file) if file else []:
            below = entry.removeprefix("/") if entry.startswith("/") or not group else f"{group}/{entry}"
            place = (file, entry) if below in (*above, path) else walk(below, (*above, path))
            if place:
                return place
        return None

    place = walk(name.removesuffix(".yaml"), ())
    if place is None:
        return ConfigError(f"recipe {name}: the values or defaults lead back to themselves", key="defaults")
    file, entry = place
    lines = file.read_text(encoding="utf-8").splitlines()
    word = re.compile(rf"(?<![\w/]){re.escape(entry)}(?![\w/])")
    number = next((n for n, line in enumerate(lines, 1) if word.search(line.partition("#")[0])), 1)
    return ConfigError(
        f"{file}, line {number}: defaults list {entry!r}, which leads back to this file; list another recipe",
        key="defaults",
        value=entry,
    )


def _listed(file: Path) -> list[str]:
    """Returns the names in the file's ``defaults``, groups as GROUP/CHOICE."""
    names = []
    for entry in (safe_load(file.read_text(encoding="utf-8")) or {}).get("defaults") or []:
        pairs = entry.items() if isinstance(entry, dict) else [(None, entry)]
        for group, choice in pairs:
            group = re.sub(r"^(override|optional)\s+", "", group).partition("@")[0] if group else None
            names.append(f"{group}/{choice}" if group else str(choice).partition("@")[0])
    return [name for name in names if name != "_self_"]
