"""Collects the refusals of several rules, so that a user reads them together."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from verl_credit.config.keys.section import no_value
from verl_credit.config.resolved import data
from verl_credit.errors import ConfigError, joined

REFERENCE = re.compile(r"\$\{(?:oc\.select:)?([\w.]+)")


def refusals_of(rule: Callable[..., Iterable[ConfigError] | None], *given) -> Iterator[ConfigError]:
    """What a rule yields, and last what it raises."""
    try:
        yield from rule(*given) or ()
    except ConfigError as error:
        yield error
    except OmegaConfBaseException as error:  # a key that the rule reads is absent, or is ???
        yield no_value(str(error.full_key), error)


def refuse(rules: Iterable[Callable[..., Iterable[ConfigError] | None]], config: DictConfig, *given) -> None:
    """Raises what the rules refuse: ConfigError for one fault, ConfigErrors for several."""
    found: list[ConfigError] = []
    for rule in rules:
        try:
            found += refusals_of(rule, config, *given)
        except Exception:
            if not found:  # else a value that has been refused is what the rule could not read
                raise
    if found:
        written = data(config, resolve=False)
        for error in [one for several in found for one in getattr(several, "errors", [several])]:
            error.beside = (*error.beside, *_made_of(error.key, written))
        raise joined(found) from found[0].__cause__


def _made_of(key: str, written: Mapping[str, Any]) -> list[str]:
    """The keys that the key's value refers to, also through other keys. ``written``: with interpolations."""
    names = [key]
    for name in names:  # which grows
        value: Any = written
        for part in name.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        found = REFERENCE.findall(value) if isinstance(value, str) else []
        names += [one for one in found if one not in names]
    return names[1:]
