"""Declares every key of verl_credit once: name, type, range, default, effect, and when it is read."""

from __future__ import annotations

from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl_credit.config.keys import reads
from verl_credit.config.keys.algorithm import AUTO, CANONICAL, DETECTORS, SCORERS, Algorithm, TurnJudge
from verl_credit.config.keys.environment import Environment
from verl_credit.config.keys.run import FOLDERS, Doorkey, Evaluation, Faults, Lab, Lineage, Probe, Real, Run
from verl_credit.config.keys.search import Search
from verl_credit.config.keys.section import Key, Section, chosen, keys_of, read_section
from verl_credit.config.keys.verl import LOSS, VERLS, PolicyLoss
from verl_credit.config.resolved import data

# The sections are checked in this order.
OURS: tuple[type[Section], ...] = (
    Algorithm, PolicyLoss, Search, Environment, Run, Faults, Evaluation, Probe, Lineage,
)  # fmt: skip


def our_keys() -> list[Key]:
    """Returns all our keys, section by section."""
    return [key for section in OURS for key in keys_of(section)]


def place_of(name: str) -> str | None:
    """The full name of the one declared key or section that ends with ``name``; None where there is none, or several."""
    places: set[str] = set()
    sections: list[type[Section]] = [*OURS, *VERLS, Lab, Real, Doorkey]
    for section in sections:
        for parts in (key.name.split(".") for key in keys_of(section)):
            if name in parts:
                places.add(".".join(parts[: parts.index(name) + 1]))
    return places.pop() if len(places) == 1 else None


def defaults_tree() -> dict[str, Any]:
    """Returns our keys with their defaults, nested as in a recipe."""
    tree: DictConfig = OmegaConf.create({})
    for key in our_keys():
        if not key.field.is_required():
            default = list(key.default) if isinstance(key.default, tuple) else key.default
            OmegaConf.update(tree, key.name, default)
    return data(tree)


__all__ = [
    "AUTO", "CANONICAL", "DETECTORS", "FOLDERS", "LOSS", "SCORERS",
    "Algorithm", "TurnJudge", "PolicyLoss", "Search", "Environment", "Run", "Faults", "Evaluation", "Probe",
    "Lineage", "Lab", "Real", "Doorkey",
    "OURS", "VERLS", "Key", "Section", "chosen", "defaults_tree", "keys_of", "our_keys", "place_of", "read_section", "reads",
]  # fmt: skip
