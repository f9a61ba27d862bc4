"""Defines declared keys and refuses values that they do not accept.

A section of the configuration is a class, a key is a field of it: its type and range, its default, the sentence below it,
and the condition under which it is read:

    gamma: Annotated[Number, Field(ge=0, le=1), When(reads.gains)] = 1.0
    \"""Discount of later turns' gains.\"""

From these come the defaults that recipes start from, the validation, the notes on keys that nothing reads, and
docs/keys.md. pydantic checks; the sentences are ours, so that every refusal names key, value and what is accepted.
"""

from __future__ import annotations

import ast
import inspect
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import reduce
from itertools import pairwise
from typing import Annotated, Any, ClassVar, Literal, TypeVar, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException
from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from verl_credit.config.resolved import MISSING, Tree, data, value_at
from verl_credit.errors import ConfigError, did_you_mean, joined
from verl_credit.redact import redact_value

Declared = TypeVar("Declared")
_UNKNOWN = "extra_forbidden", "unexpected_keyword_argument"
_OURS = "value_error", "assertion_error"


class Section(BaseModel):
    """The keys below ``prefix``. ``lenient``: an absent key is null."""

    model_config = ConfigDict(strict=True, frozen=True, allow_inf_nan=False, extra="ignore", defer_build=True)
    prefix: ClassVar[str] = ""
    lenient: ClassVar[bool] = False


SectionType = TypeVar("SectionType", bound=Section)


@dataclass(frozen=True)
class When:
    """``read(settings)``: does the chosen pipeline read this key? A key without this mark is always read."""

    read: Callable[[Any], bool]


@dataclass(frozen=True)
class Expected:
    """Describes the accepted values in words, where the type does not."""

    text: str


@dataclass(frozen=True)
class OneOf:
    """The names that a key of type ``str`` accepts, where they are not known before the program runs."""

    names: tuple[str, ...]

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> Any:
        return handler.generate_schema(Literal[self.names])


@dataclass(frozen=True)
class Shown:
    """Writes a value that may hold a secret into a message."""

    show: Callable[[Any], str]


@dataclass(frozen=True)
class Key:
    """A declared key with its full name."""

    name: str
    field: FieldInfo
    path: tuple[str, ...] = ()
    section: type[Section] = Section

    @property
    def default(self) -> Any:
        return self.field.get_default(call_default_factory=True)

    def is_read(self, settings: Any) -> bool:
        """Does the pipeline of these `CreditSettings` read the key?"""
        return all(mark.read(settings) for mark in self.field.metadata if isinstance(mark, When))

    @property
    def shown(self) -> Callable[[Any], str] | None:
        """The function that writes the value into a message; None: the value is written unchanged."""
        return next((m.show for m in self.field.metadata if isinstance(m, Shown)), None)

    def written(self, value: Any) -> str:
        """Returns ``key=value`` without secrets."""
        return f"{self.name}={self.shown(value) if self.shown else redact_value('', value)}"

    @property
    def sentence(self) -> str:
        """The text below the key. It is read here: pydantic would read every section's source in every process."""
        [written] = ast.parse(inspect.getsource(self.section)).body
        assert isinstance(written, ast.ClassDef)
        lines = pairwise(written.body)
        text = next(below for line, below in lines if ast.unparse(line).startswith(f"{self.path[-1]}:"))
        assert isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant)
        return inspect.cleandoc(str(text.value.value))

    @property
    def expected(self) -> str:
        return expected(self.field.annotation, self.field.metadata)


def keys_of(section: type[Section], prefix: str | None = None, path: tuple[str, ...] = ()) -> Iterator[Key]:
    """Yields every key of a section and of its inner sections, in the order of the file."""
    prefix = section.prefix if prefix is None else prefix
    for name, field in section.model_fields.items():
        full = f"{prefix}.{name}" if prefix else name
        if (inner := _inner(field)) is not None:
            yield from keys_of(inner, full, (*path, name))
        else:
            yield Key(full, field, (*path, name), section)


def _inner(field: FieldInfo) -> type[Section] | None:
    """The section that the field is, None for a key."""
    annotation = field.annotation
    return annotation if isinstance(annotation, type) and issubclass(annotation, Section) else None


def chosen(*sections: Section | None) -> Iterator[tuple[Key, Any]]:
    """Yields the keys of these sections whose values are not the defaults, with the values."""
    for section in sections:
        for key in keys_of(type(section)) if section is not None else ():
            value = reduce(getattr, key.path, section)
            if value != key.default:
                yield key, value


def read_section(section: type[SectionType], config: DictConfig | Tree) -> SectionType:
    """Reads the section's values. Raises ConfigError, for several values that are not accepted `ConfigErrors`."""
    node = value_at(config, section.prefix) if section.prefix else config
    if not isinstance(node, Mapping) and not (node is None and section.lenient):
        raise ConfigError(key=section.prefix, value=node, accepted="expected a section with keys")
    values = dict.fromkeys(section.model_fields) if node is None else _plain(section, node, section.prefix)
    try:
        return section.model_validate(values)
    except ValidationError as error:
        refused = [_refusal(section, values, complaint) for complaint in error.errors()]
        raise joined(refused[:1] if node is None else refused) from None  # null: one for all keys


def _plain(section: type[Section], node: Mapping, prefix: str) -> dict[str, Any]:
    """Resolves the declared keys only, because verl's keys beside ours may not have a value yet."""
    values: dict[str, Any] = {}
    for name, field in section.model_fields.items():
        full, inner = f"{prefix}.{name}" if prefix else name, _inner(field)
        there = name in node and not (isinstance(node, dict) and node[name] == MISSING)
        if not there and not section.lenient:
            raise ConfigError(f"{full} is missing: the recipe must list credit_defaults", key=full)
        try:
            value = (data(node[name]) if inner is None else node[name]) if there else None
        except OmegaConfBaseException as error:
            raise no_value(full, error) from error
        if inner is None:
            values[name] = value
        elif isinstance(value, Mapping):
            values[name] = _plain(inner, value, full)
        else:
            use = f"expected the keys {', '.join(inner.model_fields)}"
            raise ConfigError(key=full, value=value, accepted=use, shown=repr(value))
    return values


def _refusal(section: type[Section], values: dict[str, Any], complaint: Any) -> ConfigError:
    """The refusal of a key with its whole value, from pydantic's complaint about a part of the value."""
    name, value, owner = section.prefix, values, section
    for part in complaint["loc"]:
        name, field, value = f"{name}.{part}" if name else part, owner.model_fields[part], value[part]
        if (inner := _inner(field)) is None:
            break  # the further parts lie inside the key's value
        owner = inner
    key = Key(name, field)
    use = choices(field.annotation, field.metadata) or f"expected {key.expected}"
    use = str(complaint["ctx"]["error"]) if complaint["type"] in _OURS else use
    shown, text = (key.shown(value), None) if key.shown else (value, repr(value)[:200])
    return ConfigError(key=name, value=shown, accepted=use, shown=text)


def no_value(key: str, error: OmegaConfBaseException) -> ConfigError:
    """The error with the first line of OmegaConf's text, which names the fault; the further lines list its fields."""
    return ConfigError(f"{key} has no value: {str(error).partition(chr(10))[0]}", key=key)


class Part(BaseModel):
    """A mapping of a user's file. The docstring of a key describes its accepted values."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, use_attribute_docstrings=True)


def declared(model: type[Declared], tree: Any, source: str) -> Declared:
    """Reads ``tree`` as ``model``, whose fields are described; messages call it ``source``. An unknown key is refused first,
    because a typo explains a missing key."""
    if not isinstance(tree, dict):
        raise ConfigError(f"{source}: expected a mapping with the keys {', '.join(_fields(model))}")
    try:
        return TypeAdapter(model).validate_python(tree)
    except ValidationError as error:
        complaint = min(error.errors(), key=lambda one: one["type"] not in _UNKNOWN)
        raise _refusal_in_file(model, tree, complaint, source) from None


def _refusal_in_file(model: Any, tree: dict[str, Any], complaint: Any, source: str) -> ConfigError:
    """The refusal of a key with the part of its value that is wrong, from pydantic's complaint."""
    names, value, owner, described = [], tree, model, ""
    for part in (part for part in complaint["loc"] if part != "[key]"):
        known = _fields(owner).get(part)
        try:
            value = value[part]
        except (KeyError, IndexError, TypeError):
            if owner is None:
                continue  # this part names the branch of a union that pydantic tried
        names.append(str(part))
        if owner is not None and known is None:
            key, accepted = ".".join(names), list(_fields(owner))
            message = f"{source}: unknown key {key}{did_you_mean(part, accepted)}: accepted are {', '.join(accepted)}"
            return ConfigError(message, key=key, accepted=accepted)
        described = (known.description or "") if known else described
        owner = known.annotation if known is not None and _fields(known.annotation) else None
    key, use = ".".join(names), f"expected {described}"
    if complaint["type"] in _OURS:
        return ConfigError(f"{source}: {key + ': ' if key else ''}{complaint['ctx']['error']}", key=key)
    if complaint["type"] == "missing":
        return ConfigError(f"{source}: {key} is missing: {use}", key=key, accepted=use)
    value = redact_value(key, value)
    return ConfigError(f"{source}: {key}={value!r}: {use}", key=key, value=value, accepted=use)


def _fields(model: Any) -> dict[str, FieldInfo]:
    return getattr(model, "__pydantic_fields__", {})


def choices(annotation: Any, metadata: list[Any]) -> list[str]:
    """Returns the names that a key accepts; an empty list for other kinds of keys."""
    if get_origin(annotation) is Literal:
        return [str(name) for name in get_args(annotation)]
    return [name for mark in metadata if isinstance(mark, OneOf) for name in mark.names]


def expected(annotation: Any, metadata: list[Any]) -> str:
    """Describes the accepted values in words: ``a whole number of at least 1 or null``."""
    if words := next((m.text for m in metadata if isinstance(m, Expected)), None):
        return words
    if get_origin(annotation) is Annotated:
        annotation, *inner = get_args(annotation)
        more = [m for entry in inner for m in (entry.metadata if isinstance(entry, FieldInfo) else [entry])]
        return expected(annotation, [*metadata, *more])
    if get_origin(annotation) in (Union, types.UnionType):
        return " or ".join(expected(one, metadata) for one in get_args(annotation))
    if names := choices(annotation, metadata):
        return ", ".join(names)
    if annotation in (int, float):
        return ("a whole number" if annotation is int else "a number") + _range(metadata)
    kinds = {bool: "true or false", str: "text", dict: "a mapping", type(None): "null"}
    return kinds.get(annotation, str(annotation))


_BOUNDS = {Ge: ("ge", "of at least"), Gt: ("gt", "above"), Le: ("le", "of at most"), Lt: ("lt", "below")}


def _range(metadata: list[Any]) -> str:
    kinds = [(kind, mark) for kind in _BOUNDS for mark in metadata if isinstance(mark, kind)]
    ends = {kind: getattr(mark, _BOUNDS[kind][0]) for kind, mark in kinds}
    if Ge in ends and Le in ends:
        return f" from {ends[Ge]:g} to {ends[Le]:g}"
    return " and".join(f" {_BOUNDS[kind][1]} {end:g}" for kind, end in ends.items())
