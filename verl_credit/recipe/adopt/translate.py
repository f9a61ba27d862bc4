"""Translates the keys of a launch of verl, one by one; `fit_to_turns` then decides what several keys decide together."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from verl_credit.config.resolved import select
from verl_credit.errors import did_you_mean
from verl_credit.recipe import compose
from verl_credit.recipe.adopt.adapt import fit_to_turns
from verl_credit.recipe.adopt.adoption import CHOICES, NULL, Adoption, shown
from verl_credit.recipe.adopt.script import FULLY_ASYNC, MAIN
from verl_credit.recipe.older_verl import (
    ESTIMATORS,
    GONE,
    NEAREST,
    PER_GPU,
    VALUES,
    longest,
    renamed,
)
from verl_credit.recipe.rules.known import known_keys

RECIPE = "verl"
"""The recipe that an adopted launch starts from."""
ESTIMATOR = "algorithm.adv_estimator"
MODE = "algorithm.info_gain_norm_mode"


def adopt(pairs: Iterable[tuple[str, str]], entry: str = MAIN) -> Adoption:
    """``pairs``: the keys with their values in the launch's order; a later one wins."""
    adoption, known = Adoption(), _Known()
    given: dict[str, str] = {}
    for key, text in pairs:
        given.pop(key, None)
        given[key] = text
    for key, text in given.items():
        _one(adoption, known, key, text)
    _estimator(adoption, given.get(ESTIMATOR))
    fit_to_turns(adoption, given, asynchronous=entry == FULLY_ASYNC)
    adoption.new_keys = {key for key in adoption.given if key not in CHOICES and not known.listed(key)}
    return adoption


def _one(adoption: Adoption, known: _Known, key: str, text: str) -> None:
    if key in ROWS:
        adoption.given[key] = text
        return
    if (key, text) in VALUES:
        value, why = VALUES[key, text]
        if value is None:
            adoption.drop(key, text, why)
        else:
            adoption.put(key, value, why, old=shown(key, text))
        return
    place = renamed(key)
    if place is not None and not (place in adoption.given and text == NULL):
        if text != NULL:
            adoption.put(place, text, "the key's place now", old=shown(key, text))
        return
    if key in PER_GPU or key == ESTIMATOR:  # decided with other keys
        adoption.given[key] = text
    elif (gone := longest(GONE, key)) is not None:
        if text.lower() not in (NULL, "none") and not _same(key, text):
            adoption.drop(key, text, GONE[gone])
    elif key in CHOICES or known.takes(key):
        adoption.given[key] = text
    else:
        adoption.drop(key, text, f"neither verl 0.9.1 nor verl_credit reads it{known.near(key)}")


ROWS = (
    "max_turns", "env.max_steps", "env.env_name", "data.max_start_length", "data.max_obs_length",
)  # fmt: skip
"""Keys of forks from which `fit_to_turns` makes the lengths of a row and its turns."""
_SAME = {
    "trainer.use_v1": "true", "actor_rollout_ref.model.use_fused_kernels": "false", "trainer.critic_warmup": "0",
}  # fmt: skip


def _same(key: str, text: str) -> bool:
    """Does a key that has no place say what is the case anyway?"""
    one_rank = key.endswith("ulysses_sequence_parallel_size") and text == "1"
    return one_rank or text.lower() == _SAME.get(key)


def _estimator(adoption: Adoption, name: str | None) -> None:
    """An estimator of verl would switch every turn's credit off; ours takes its place, with its outcome operator."""
    adoption.given.pop(ESTIMATOR, None)
    if name is None:
        adoption.notes.append(
            "algorithm.adv_estimator is not given: outcomes are normalised by group, as in GRPO"
        )
        return
    operator, why = ESTIMATORS.get(name, ("grpo", NEAREST))
    adoption.put("algorithm.advantage_mode", operator, why, old=f"{ESTIMATOR}={name}")
    if name == "gigpo":
        adoption.put(
            MODE, "gigpo", "verl has no such estimator; it is a turn mode here", old=f"{ESTIMATOR}={name}"
        )


class _Known:
    """The keys that verl 0.9.1 and verl_credit read."""

    def __init__(self) -> None:
        self.keys, self.recipe = known_keys("dp"), compose.compose_recipe(RECIPE, [])

    def listed(self, key: str) -> bool:
        """Does the recipe have the key, so that an override needs no plus?"""
        parent, _, name = key.rpartition(".")
        section = select(self.recipe, parent) if parent else self.recipe
        return isinstance(section, Mapping) and name in section

    def takes(self, key: str) -> bool:
        """Is it a key, or below a mapping that takes any key?"""
        parent, _, name = key.rpartition(".")
        parts = key.split(".")
        sections = [".".join(parts[:n]) for n in range(1, len(parts))]
        return name in self.keys.names.get(parent, ()) or any(one in self.keys.open for one in sections)

    def near(self, key: str) -> str:
        """`` (did you mean x?)`` for a mistyped name below a section that exists."""
        parent, _, name = key.rpartition(".")
        return did_you_mean(name, self.keys.names.get(parent, ()), lambda near: f"{parent}.{near}")
