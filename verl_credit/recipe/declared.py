"""YAML files whose keys a pydantic model declares, and refusals that name file, key, value and what would be right."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError
from yaml import YAMLError

from verl_credit.errors import ConfigError, did_you_mean, one_line
from verl_credit.recipe.unreadable import not_yaml
from verl_credit.redact import redact_value

Declared = TypeVar("Declared")


class Part(BaseModel):
    """A mapping of such a file. The docstring of a key says which values it accepts."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, use_attribute_docstrings=True)


def read_tree(path: Path) -> Any:
    """What the file holds, without interpolation; a key that stands twice is refused. Errors: ConfigError."""
    try:
        return OmegaConf.to_container(OmegaConf.load(path), resolve=False)
    except YAMLError as error:
        raise not_yaml(error) from error
    except (OSError, UnicodeDecodeError, OmegaConfBaseException, RecursionError) as error:
        raise ConfigError(f"{path} cannot be read: {one_line(str(error))}") from error


def declared(model: type[Declared], tree: Any, source: str) -> Declared:
    """``tree`` as ``model``, a pydantic model or dataclass with described fields; ``source``: what messages call it."""
    if not isinstance(tree, dict):
        raise ConfigError(f"{source}: expected a mapping with the keys {', '.join(_fields(model))}")
    try:
        return TypeAdapter(model).validate_python(tree)
    except ValidationError as error:
        # A typo explains what is missing, so it is told first.
        errors = sorted(error.errors(), key=lambda one: one["type"] not in _UNKNOWN)
        raise _refusal(model, tree, source, errors[0]) from None


_UNKNOWN = "extra_forbidden", "unexpected_keyword_argument"


def _fields(model: Any) -> dict:
    return getattr(model, "__pydantic_fields__", {})


def _refusal(model: Any, tree: dict, source: str, error: dict) -> ConfigError:
    """FILE: KEY=VALUE: what is wrong; expected is ..."""
    path = [part for part in error["loc"] if part != "[key]"]
    value: Any = tree
    told, right = [], ""
    for part in path:
        field = _fields(model).get(part)
        try:
            value = value[part]
        except (KeyError, IndexError, TypeError):
            if field is None and model is None:
                continue  # which branch of a union pydantic tried
        told.append(str(part))
        if error["type"] in _UNKNOWN and part == path[-1] and model is not None:
            names = list(_fields(model))
            where = f"{source}: unknown key {'.'.join(told)}{did_you_mean(part, names)}"
            return ConfigError(
                f"{where}: accepted are {', '.join(names)}", key=".".join(told), accepted=names
            )
        right = field.description if field is not None else right
        kind = field.annotation if field is not None else None
        model = kind if _fields(kind) else None
    key = ".".join(told)
    if error["type"] == "missing":
        return ConfigError(f"{source}: {key} is missing: expected {right}", key=key)
    if error["type"] in ("value_error", "assertion_error"):  # what a check of the model itself said
        said = str(error["ctx"]["error"])
        return ConfigError(f"{source}: {key + ': ' if key else ''}{said}", key=key, value=None)
    shown = redact_value(key, value)
    return ConfigError(f"{source}: {key}={shown!r}: expected {right}", key=key, value=shown)
