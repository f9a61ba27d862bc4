"""Refuses keys of older versions of verl, and values that verl_credit had before, each with what takes its place.

verl 0.9.1 composes the older keys without reading them, so that a user's reward function would not be used.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any

from verl_credit.config.gone import gone_value
from verl_credit.errors import ConfigError
from verl_credit.recipe.older_verl import OLDER

OLD_TRAINER = "trainer.use_v1"


def validate_older(values: Iterable[tuple[str, Any]]) -> Iterator[ConfigError]:
    """Yields a refusal for every key of an older verl, which would do nothing, and for every value that is gone."""
    for key, value in values:
        if use := gone_value(key, value):
            yield ConfigError(key=key, value=value, accepted=use)
        if key == OLD_TRAINER and value is not None and not value:
            use = "turns are trained by verl's v1 trainer alone, and nothing here starts the older one; leave it out"
            yield ConfigError(key=key, value=value, accepted=use)
        old = _older(key)
        if old is not None and value is not None:
            now = OLDER[old] + key.removeprefix(old)
            use = f"a key of an older verl, which nothing reads now; use {now}"
            yield ConfigError(key=key, value=value, accepted=use, meant=now)


@cache
def _older(key: str) -> str | None:
    return next((name for name in OLDER if f"{key}.".startswith(f"{name}.")), None)
