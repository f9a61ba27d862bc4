"""Settings for tests: the declared defaults with changes, keys of inner sections written gtpo__beta=0.5."""

from __future__ import annotations

import math
from typing import Annotated, get_args, get_origin

from verl_credit.config.keys import Algorithm, PolicyLoss, keys_of
from verl_credit.config.settings import CreditSettings


def nested(changes: dict) -> dict:
    found: dict = {}
    for name, value in changes.items():
        outer, _, inner = name.partition("__")
        if inner:
            found.setdefault(outer, {})[inner] = value
        else:
            found[outer] = value
    return found


def algorithm(**changes) -> Algorithm:
    return Algorithm.model_validate(nested(changes))


DECIDED = {"info_gain_norm_mode": "turn-group-v1d", "lam": 1.0}
"""In place of auto, which a composed recipe decides."""


def settings(**changes) -> CreditSettings:
    """Our turn loss with dynamic clip; names of the algorithm, of the loss, and of CreditSettings itself."""
    of_loss = {name: changes.pop(name) for name in PolicyLoss.model_fields if name in changes}
    own = {
        name: changes.pop(name) for name in ("chat_template_kwargs", "attention", "preset") if name in changes
    }
    template = {"info_gain_template": "<answer>{answer}</answer>", "info_gain_scorer": "branch"}
    template |= DECIDED
    loss = PolicyLoss.model_validate({"dynamic_clip": True} | of_loss)
    return CreditSettings(algorithm(**template | changes), loss, **own)


def numbers(section) -> list[tuple[str, float, float, bool]]:
    """(key, smallest, largest, whole number?) of a section's keys that are numbers."""
    found = []
    for key in keys_of(section):
        words = key.expected
        if words.startswith(("a number", "a whole number")):
            low, high = bounds(key)
            found.append((key.name, low, high, words.startswith("a whole")))
    return found


def bounds(key) -> tuple[float, float]:
    """Smallest and largest value that pydantic accepts for a number, read from the declaration."""
    field, metadata = key.field, list(key.field.metadata)
    for one in get_args(field.annotation):
        for entry in get_args(one)[1:] if get_origin(one) is Annotated else ():
            metadata += getattr(entry, "metadata", [entry])
    low = next((m.ge for m in metadata if hasattr(m, "ge")), -math.inf)
    return low, next((m.le for m in metadata if hasattr(m, "le")), math.inf)
