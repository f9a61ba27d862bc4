"""Conditions on the chosen pipeline (`CreditSettings`) under which a key is read."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from inspect import iscoroutinefunction
from operator import attrgetter
from typing import Any

from verl_credit.credit.outcome import OUTCOME_OPERATORS
from verl_credit.credit.plugins.load import load, plugin_path
from verl_credit.credit.token.token_transforms import TRANSFORMS, TokenTransform
from verl_credit.credit.token.uncertainty import canonical_kind
from verl_credit.credit.turn.value_providers import PROVIDERS, reads_states, regressed

COLUMN = "column:"
"""The prefix in the name of a turn signal that is a column of the rows."""
VALUES = f"null, {', '.join(PROVIDERS)}, {COLUMN}NAME, or my_module.my_features"


def transform(s) -> TokenTransform:
    """The chosen token transform; an empty transform where it is a user's or a name that is not in the list."""
    return TRANSFORMS.get(s.algorithm.transform_mode, TokenTransform())


gains = attrgetter("scores_gain")
searches, canonical = attrgetter("search.max_searches"), attrgetter("algorithm.canonical_transform")


def ours(s) -> bool:
    return s.turn_estimator and not s.algorithm.replaces_turns


def turn_level(s) -> bool:
    return s.turn_estimator and s.algorithm.takes_turn_rewards


def anchored(s) -> bool:
    """The turn mode or its values read anchors, or a user's algorithm, which replaces the pipeline, may read them."""
    if s.algorithm.algorithm_mode is not None:
        return s.turn_estimator
    by_state = values_read(s) and reads_states(s.algorithm.turn_values)
    return ours(s) and ("anchor_B_K1" in s.algorithm.turn_mode.tables or by_state)


def grouped(s) -> bool:
    """The credit compares rollouts of a prompt: the turn mode, or the outcome operator that it takes, declares that it reads
    groups. A user's operator is taken to read them, unless its attribute ``reads`` leaves them out."""
    a = s.algorithm
    if not s.turn_estimator:
        return True
    if a.algorithm_mode is not None or a.canonical_transform:
        return "groups" in _declared(a.algorithm_mode, "algorithm.algorithm_mode")
    operator = OUTCOME_OPERATORS.get(a.advantage_mode)
    of_outcome = operator.reads if operator else _declared(a.advantage_mode, "algorithm.advantage_mode")
    return "groups" in a.turn_mode.reads or (a.turn_mode.any_outcome_operator and "groups" in of_outcome)


def _declared(path: str | None, key: str) -> tuple[str, ...]:
    """What a user's operator reads; one that cannot be loaded is refused elsewhere."""
    with suppress(ValueError):
        return getattr(load(path, key) if path else None, "reads", ("rewards", "groups"))
    return ("rewards", "groups")


def values_read(s) -> bool:
    return ours(s) and "value_B_K1" in s.algorithm.turn_mode.tables


def valued(s) -> bool:
    return values_read(s) and s.algorithm.turn_values is not None


def fitted(s) -> bool:
    """The values are a regression's."""
    return valued(s) and regressed(s.algorithm.turn_values)


def is_path(name: str) -> bool:
    """Is the name a dotted path (my_module.my_signal, my_module:my_signal), and not a built-in name or a column?"""
    return bool({".", ":"} & set(name)) and not name.startswith(COLUMN)


def own_signals(s) -> list[str]:
    """The dotted paths of the turn signals that are plug-ins."""
    return [path for name in s.turn_signals if not name.startswith(COLUMN) and (path := plugin_path(name))]


def judged(s) -> bool:
    """A user's turn signal is a coroutine."""
    return any(iscoroutinefunction(load(path, "algorithm.turn_signal")) for path in own_signals(s))


def rescaled(s) -> bool:
    return "alpha" in s.algorithm.turn_mode.options


def divides(s) -> bool:
    """Outcomes are divided by their group's std."""
    a = s.algorithm
    if not s.turn_estimator:
        return True
    reads = "norm_by_std" in a.turn_mode.options
    return not a.replaces_turns and reads and (s.scores_gain or a.advantage_mode == "grpo")


def own_code(s) -> bool:
    """A user's transform or algorithm gets every key and may read it."""
    return s.algorithm.algorithm_mode is not None or s.algorithm.own_transform


def _transform_that(flag: str) -> Callable[[Any], bool]:
    """The chosen token transform has the flag, or a user's code may read the key."""
    return lambda s: own_code(s) or getattr(transform(s), flag)


weighted, amplified, sepa, planned = map(
    _transform_that, ("weighted", "amplified", "uses_sepa_controller", "needs_planning")
)


def _transform_called(name: str) -> Callable[[Any], bool]:
    return lambda s: s.algorithm.transform_mode == name


gtpo_canonical, grpo_s = map(_transform_called, ("gtpo_canonical", "grpo_s"))


def uncertain(s) -> bool:
    return weighted(s) or canonical(s)


def own_transform(s) -> bool:
    return s.algorithm.own_transform or canonical_kind(s.algorithm.uncertainty_kind) is None
