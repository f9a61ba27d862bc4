"""Declares every key of verl_credit once: name, type, range, default, effect, and when it is read."""

from __future__ import annotations

from functools import cache
from typing import Any

from verl_credit.config.keys import reads
from verl_credit.config.keys.algorithm import AUTO, CANONICAL, DETECTORS, SCORERS, Algorithm, TurnJudge
from verl_credit.config.keys.run import (
    EVALUATION_MODES,
    FOLDERS,
    Evaluation,
    Faults,
    Lab,
    Lineage,
    Probe,
    Real,
    Run,
)
from verl_credit.config.keys.search import Search
from verl_credit.config.keys.section import Key, Section, keys_of, read_section
from verl_credit.config.keys.verl import LOSS, VERLS, PolicyLoss

# The sections are checked in this order.
OURS: tuple[type[Section], ...] = (Algorithm, PolicyLoss, Search, Run, Faults, Evaluation, Probe, Lineage)


def our_keys() -> list[Key]:
    """Returns all our keys, section by section."""
    return [key for section in OURS for key in keys_of(section)]


@cache
def _places() -> dict[str, set[str]]:
    """Maps the last part of every declared key and section to the full names that end with it."""
    places: dict[str, set[str]] = {}
    for section in (*OURS, *VERLS, Lab, Real):
        for key in keys_of(section):
            parts = key.name.split(".")
            for n, part in enumerate(parts):
                places.setdefault(part, set()).add(".".join(parts[: n + 1]))
    return places


def place_of(name: str) -> str | None:
    """The full name of the one declared key that ends with ``name``; None where there is none, or several."""
    places = _places().get(name, set())
    return next(iter(places)) if len(places) == 1 else None


def defaults_tree() -> dict[str, Any]:
    """Returns our keys with their defaults, nested as in a recipe."""
    tree: dict[str, Any] = {}
    for key in our_keys():
        if key.field.is_required():
            continue
        *parents, leaf = key.name.split(".")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[leaf] = list(key.default) if isinstance(key.default, tuple) else key.default
    return tree


__all__ = [
    "AUTO", "CANONICAL", "DETECTORS", "EVALUATION_MODES", "FOLDERS", "LOSS", "SCORERS",
    "Algorithm", "TurnJudge", "PolicyLoss", "Search", "Run", "Faults", "Evaluation", "Probe", "Lineage", "Lab", "Real",
    "OURS", "VERLS", "Key", "Section", "defaults_tree", "keys_of", "our_keys", "place_of", "read_section", "reads",
]  # fmt: skip
