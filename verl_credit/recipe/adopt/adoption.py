"""The keys of an adopted launch, and what became of each key that the user gave."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from verl_credit.config.resolved import data
from verl_credit.errors import ConfigError
from verl_credit.recipe.adopt.deciding import closes, decides
from verl_credit.recipe.compose import GROUPS, quoted
from verl_credit.recipe.step_size import BATCH, MINI_BATCH
from verl_credit.redact import redact_value

CHOICES = (*GROUPS, "credit")
NULL = "null"


class Change(NamedTuple):
    old: str
    new: str
    why: str


@dataclass
class Adoption:
    """``given``: today's keys with their values as Hydra reads them."""

    given: dict[str, str] = field(default_factory=dict)
    translated: list[Change] = field(default_factory=list)
    dropped: list[Change] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    new_keys: set[str] = field(default_factory=set)
    """Keys that the recipe `verl` does not have, which Hydra adds with a plus."""
    lost: dict[str, str] = field(default_factory=dict)
    """What decides the run and is not in the result as the launch has it, and the reason."""
    keyless: set[str] = field(default_factory=set)
    """What is lost and no key beside the launch can give."""
    chosen: frozenset[str] = frozenset()
    """The keys that are given beside the launch, which close gaps."""

    def put(self, key: str, value: object, why: str, old: str = "") -> None:
        """Sets a key that the user did not give in this form."""
        text = str(value)
        if self.given.get(key) != text:
            self.given[key] = text
            self.translated.append(Change(old, shown(key, text), why))

    def drop(self, key: str, text: str, why: str, *, lost: bool | None = None) -> None:
        """``lost``: the run is another one without the key; by default where the key decides."""
        self.given.pop(key, None)
        self.dropped.append(Change(shown(key, text), "", why))
        if decides(key, text) if lost is None else lost:
            self.lose(key, why, {*closes(key, read=False)} - {key})

    def lose(self, key: str, why: str, closed_by: Iterable[str]) -> None:
        if not self.chosen.intersection(closed_by := {*closed_by}):
            self.lost.setdefault(key, why)
            if not closed_by:
                self.keyless.add(key)

    def known(self, *keys: str) -> bool:
        """Does the launch leave no value open from which others would be computed?"""
        return not any(key in self.lost for key in keys)

    def causes(self, error: ConfigError) -> bool:
        """Does what is lost explain all that is refused?"""
        lost = {*self.lost, *([BATCH] if MINI_BATCH in self.lost else [])}
        return all({one.key, *one.beside} & lost for one in getattr(error, "errors", [error]))

    def number(self, key: str, default: int = 0) -> int:
        """Returns the key's value; ``default`` where it has none, or none that is a number."""
        try:
            return int(self.given[key])
        except (KeyError, ValueError):
            return default

    def count(self, key: str, default: int) -> int:
        """A number that others are divided by: at least 1."""
        return max(self.number(key, default), 1)

    def is_on(self, key: str, default: bool = False) -> bool:
        return self.given.get(key, str(default)).lower() == "true"

    def has(self, key: str) -> bool:
        return self.given.get(key, NULL) not in (NULL, "None", "")

    def overrides(self) -> list[str]:
        return [f"{'+' * (key in self.new_keys)}{key}={value}" for key, value in self.given.items()]

    def tree(self) -> dict[str, Any]:
        """The keys as nested data, for a YAML file; the choices of groups are left out."""
        tree = OmegaConf.create({})
        for key, text in self.given.items():
            if key not in CHOICES:
                OmegaConf.update(tree, key, value_of(key, text), force_add=True)
        return data(tree, resolve=False)

    def choices(self) -> dict[str, str]:
        return {key: value for key, value in self.given.items() if key in CHOICES}


def whole(key: str, text: str) -> int:
    """The number of a key that other keys are made of. Raises ConfigError."""
    if not text.isdecimal():
        raise ConfigError(key=key, value=text, accepted="expected a whole number")
    return int(text)


def key_of(argument: str) -> str:
    return argument.lstrip("+~").partition("=")[0]


def shown(key: str, text: str) -> str:
    return f"{key}={redact_value(key.rpartition('.')[2] if '_key' in key else '', text)}"


def value_of(key: str, text: str) -> Any:
    """The value that Hydra reads in ``key=text``. Raises ConfigError."""
    try:
        (override,) = OverridesParser.create().parse_overrides([f"+{key}={text}"])
    except Exception as error:  # the parser's errors have no common class
        use = "Hydra cannot read that override; quote the value"
        raise ConfigError(key=key, value=text, accepted=use) from error
    if override.is_sweep_override():
        use = "these are several values, and a launch has one; a list is [a,b], and a text with a comma stands in quotes"
        raise ConfigError(key=key, value=text, accepted=use)
    return override.value()


def as_text(value: Any) -> str:
    """A value of a YAML file as an override has it."""
    if value is None:
        return NULL
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return "[" + ",".join(map(as_text, value)) + "]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}: {as_text(one)}" for key, one in value.items()) + "}"
    text = str(value)
    if not isinstance(value, str) or text.startswith("${"):
        return text
    with suppress(ConfigError):
        if value_of("key", text) == text:
            return text
    return quoted(text)
