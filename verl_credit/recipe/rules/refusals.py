"""Collects the refusals of one configuration, so that a user reads all of them at once."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from copy import deepcopy
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from verl_credit.config.keys import AUTO, our_keys
from verl_credit.config.keys.section import no_value
from verl_credit.config.resolved import Config, select
from verl_credit.errors import ConfigError, ConfigErrors

REFERENCE = re.compile(r"\$\{(?:oc\.select:)?([\w.]+)")


def refusals_of(rule: Callable[..., Iterable[ConfigError] | None], *given) -> Iterator[ConfigError]:
    """What a rule yields, and last what it raises."""
    try:
        yield from rule(*given) or ()
    except ConfigError as error:
        yield error
    except OmegaConfBaseException as error:  # a key that the rule reads is absent, or is ???
        yield no_value(str(error.full_key), error)


class Refusals:
    """``written``: the configuration with its interpolations, since a value may be another key's."""

    def __init__(self, errors: Iterable[ConfigError], written: Mapping[str, Any]) -> None:
        self.errors = list(errors)
        self._written = written

    def add(self, error: ConfigError) -> None:
        for one in error.errors if isinstance(error, ConfigErrors) else [error]:
            if one.value == AUTO and self.errors:
                continue  # it is decided by the keys that are refused
            one.beside = (*one.beside, *self._made_of(one.key))
            self.errors.append(one)

    def _made_of(self, key: str) -> list[str]:
        """The keys that the key's value refers to, also through other keys."""
        names: list[str] = []
        open_ = [key]
        while open_:
            value: Any = self._written
            for part in open_.pop().split("."):
                value = value.get(part) if isinstance(value, dict) else None
            found = REFERENCE.findall(value) if isinstance(value, str) else []
            new = [name for name in found if name not in names]
            names += new
            open_ += new
        return names

    def collect(self, rule: Callable, *given) -> None:
        """Calls a rule, which yields its refusals or raises one."""
        try:
            for error in refusals_of(rule, *given):
                self.add(error)
        except Exception:
            if not self.errors:  # else a value that has been refused is what the rule could not read
                raise

    def finish(self, cause: BaseException | None = None) -> None:
        """Raises what was found; one refusal as it is."""
        if not self.errors:
            return
        several = ConfigErrors(self.errors)
        if len(several.errors) > 1:
            raise several from cause
        [only] = several.errors
        raise only from cause or only.__cause__


def with_defaults(config: Config, errors: list[ConfigError]) -> Config:
    """Returns the configuration with the default in place of every refused value of ours, for rules of other keys."""
    if not errors:
        return config
    config, defaults = deepcopy(config), {key.name: key for key in our_keys() if not key.field.is_required()}
    for one in ConfigErrors(errors).errors:
        parent = one.key.rpartition(".")[0]
        section = select(config, parent) if parent else config
        if one.key in defaults and isinstance(section, DictConfig):
            OmegaConf.update(config, one.key, defaults[one.key].default, force_add=True)
    return config
