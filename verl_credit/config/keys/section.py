"""What a declared key is, and what is said of a value that it does not accept.

A section of the configuration is a class, a key is a field of it: its type and range, its default, the sentence below it,
and when it is read:

    gamma: Annotated[Number, Field(ge=0, le=1), When(reads.gains)] = 1.0
    \"""Discount of later turns' gains.\"""

From these come the defaults that recipes start from, the validation, the notes on keys that nothing reads, and
docs/keys.md. pydantic checks; the sentences are ours, so that every refusal names key, value and what is accepted.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le
from omegaconf.errors import OmegaConfBaseException
from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic.fields import FieldInfo

from verl_credit.config.resolved import Config, data, select
from verl_credit.errors import ConfigError


class Section(BaseModel):
    """Keys below ``prefix``. ``lenient``: a key that is not there is null."""

    model_config = ConfigDict(
        strict=True, frozen=True, allow_inf_nan=False, extra="ignore", use_attribute_docstrings=True
    )
    prefix: ClassVar[str] = ""
    lenient: ClassVar[bool] = False


@dataclass(frozen=True)
class When:
    """``read(settings)``: does the chosen pipeline read this key? Keys without one are always read."""

    read: Callable[[Any], bool]


@dataclass(frozen=True)
class Expected:
    """Says in words what a value has to be, where the type does not."""

    text: str


@dataclass(frozen=True)
class Shown:
    """How a value that may hold a secret stands in a message."""

    show: Callable[[Any], str]


@dataclass(frozen=True)
class Key:
    """A declared key with its full name."""

    name: str
    field: FieldInfo
    path: tuple[str, ...]

    @property
    def default(self) -> Any:
        return self.field.get_default(call_default_factory=True)

    @property
    def read(self) -> Callable[[Any], bool] | None:
        return next((m.read for m in self.field.metadata if isinstance(m, When)), None)

    @property
    def shown(self) -> Callable[[Any], str] | None:
        """How a message may show the value; None: as it is."""
        return next((m.show for m in self.field.metadata if isinstance(m, Shown)), None)

    @property
    def expected(self) -> str:
        return expected(self.field.annotation, self.field.metadata)


def keys_of(section: type[Section], prefix: str | None = None, path: tuple[str, ...] = ()) -> Iterator[Key]:
    """Every key of a section and of those inside it, in the order of the file."""
    prefix = section.prefix if prefix is None else prefix
    for name, field in section.model_fields.items():
        full = f"{prefix}.{name}" if prefix else name
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
            yield from keys_of(field.annotation, full, (*path, name))
        else:
            yield Key(full, field, (*path, name))


def read_section(section: type[Section], config: Config) -> Section:
    """The section's values. Raises ConfigError for the first that is not accepted."""
    node = select(config, section.prefix) if section.prefix else config
    if not isinstance(node, Mapping) and not (node is None and section.lenient):
        raise ConfigError(key=section.prefix, value=node, accepted="expected a section with keys")
    values = dict.fromkeys(section.model_fields) if node is None else _plain(section, node, section.prefix)
    try:
        return section.model_validate(values)
    except ValidationError as error:
        raise refusal(section, values, error.errors()[0]) from None


def _plain(section: type[Section], node: Mapping, prefix: str) -> dict[str, Any]:
    """Only what is declared, resolved: verl's keys beside ours may still wait for a value."""
    values: dict[str, Any] = {}
    for name, field in section.model_fields.items():
        full = f"{prefix}.{name}" if prefix else name
        if name not in node and section.lenient:
            values[name] = None
            continue
        if name not in node:
            raise ConfigError(
                f"{full} is missing: the recipe must list credit_defaults, which has it", key=full
            )
        value = _value(full, node, name)
        inner = field.annotation
        if isinstance(inner, type) and issubclass(inner, Section):
            if not isinstance(value, Mapping):
                keys = ", ".join(inner.model_fields)
                raise ConfigError(
                    key=full, value=value, accepted=f"expected the keys {keys}", shown=repr(value)
                )
            values[name] = _plain(inner, value, full)
        else:
            values[name] = data(value)
    return values


def _value(full: str, node: Mapping, name: str) -> Any:
    try:
        return node[name]
    except OmegaConfBaseException as error:
        raise no_value(full, error) from error


def no_value(key: str, error: OmegaConfBaseException) -> ConfigError:
    """OmegaConf's own text has a line for each of its fields; the first says what is wrong."""
    said, _, _ = str(error).partition("\n")
    return ConfigError(f"{key} has no value: {said}", key=key)


def refusal(section: type[Section], values: dict[str, Any], error: dict) -> ConfigError:
    """Of pydantic's first complaint: the key, its value, and what it accepts."""
    path = tuple(part for part in error["loc"] if isinstance(part, str))
    key = next(k for k in keys_of(section) if k.path == path[: len(k.path)])
    value: Any = values
    for part in key.path:
        value = value[part]
    accepted: Any = choices(key.field.annotation) or f"expected {key.expected}"
    if error["type"] == "value_error":  # of a validator of ours
        accepted = str(error["ctx"]["error"])
    if key.shown:
        return ConfigError(key=key.name, value=key.shown(value), accepted=accepted)
    return ConfigError(key=key.name, value=value, accepted=accepted, shown=repr(value)[:200])


def choices(annotation: Any) -> list[str] | None:
    """The names that a key accepts; None for other kinds of keys."""
    return [str(name) for name in get_args(annotation)] if get_origin(annotation) is Literal else None


def expected(annotation: Any, metadata: list[Any]) -> str:
    """What a value has to be, in words: ``a whole number of at least 1 or null``."""
    if said := next((m.text for m in metadata if isinstance(m, Expected)), None):
        return said
    if get_origin(annotation) is Annotated:
        annotation, *inner = get_args(annotation)
        more = [m for entry in inner for m in (entry.metadata if isinstance(entry, FieldInfo) else [entry])]
        return expected(annotation, [*metadata, *more])
    if get_origin(annotation) in (Union, types.UnionType):
        return " or ".join(expected(one, metadata) for one in get_args(annotation))
    if names := choices(annotation):
        return ", ".join(names)
    if annotation in (int, float):
        return ("a whole number" if annotation is int else "a number") + _range(metadata)
    return {bool: "true or false", str: "text", dict: "a mapping", type(None): "null"}.get(
        annotation, str(annotation)
    )


def _range(metadata: list[Any]) -> str:
    low = next((m.ge for m in metadata if isinstance(m, Ge)), None)
    above = next((m.gt for m in metadata if isinstance(m, Gt)), None)
    high = next((m.le for m in metadata if isinstance(m, Le)), None)
    if low is not None and high is not None:
        return f" from {low:g} to {high:g}"
    if low is not None:
        return f" of at least {low:g}"
    return f" above {above:g}" if above is not None else ""
