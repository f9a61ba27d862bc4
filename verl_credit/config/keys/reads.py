"""Conditions on the chosen pipeline (`CreditSettings`) under which a key is read."""

from __future__ import annotations

from inspect import iscoroutinefunction

from verl_credit.credit.outcome import OUTCOME_OPERATORS
from verl_credit.credit.plugins import load
from verl_credit.credit.token.token_transforms import TRANSFORMS, TokenTransform
from verl_credit.credit.token.uncertainty import canonical_kind

COLUMN = "column:"
"""The prefix in the name of a turn signal that is a column of the rows."""


def transform(s) -> TokenTransform:
    """The chosen token transform; an empty transform where it is a user's or a name that is not in the list."""
    return TRANSFORMS.get(s.algorithm.transform_mode, TokenTransform())


def ours(s) -> bool:
    return s.turn_estimator and not s.algorithm.replaces_turns


def turn_level(s) -> bool:
    return s.turn_estimator and s.algorithm.takes_turn_rewards


def anchored(s) -> bool:
    """The turn mode reads anchors, or a user's algorithm, which replaces the pipeline, may read them."""
    if s.algorithm.algorithm_mode is not None:
        return s.turn_estimator
    return ours(s) and "anchor_B_K1" in s.algorithm.turn_mode.tables


def several_signals(s) -> bool:
    return len(s.turn_signals) > 1


def is_path(name: str) -> bool:
    """Is the name a dotted path (my_module.my_signal, my_module:my_signal), and not a built-in name or a column?"""
    return bool({".", ":"} & set(name)) and not name.startswith(COLUMN)


def own_signal(s) -> bool:
    return any(map(is_path, s.turn_signals))


def judged(s) -> bool:
    """A user's turn signal is a coroutine."""
    own = filter(is_path, s.turn_signals)
    return any(iscoroutinefunction(load(name, "algorithm.turn_signal")) for name in own)


def gains(s) -> bool:
    return s.scores_gain


def scorer(s) -> bool:
    return s.uses_scorer


def discounts(s) -> bool:
    return not s.turn_estimator or "gamma" in s.algorithm.turn_mode.options


def rescaled(s) -> bool:
    return "alpha" in s.algorithm.turn_mode.options


def divides(s) -> bool:
    """Outcomes are divided by their group's std."""
    a = s.algorithm
    if not s.turn_estimator:
        return True
    reads = "norm_by_std" in a.turn_mode.options
    return not a.replaces_turns and reads and (gains(s) or a.advantage_mode == "grpo")


def own_code(s) -> bool:
    """A user's transform or algorithm gets every key and may read it."""
    return s.algorithm.algorithm_mode is not None or s.algorithm.own_transform


def weighted(s) -> bool:
    return own_code(s) or transform(s).weighted


def uncertain(s) -> bool:
    return weighted(s) or s.algorithm.canonical_transform


def amplified(s) -> bool:
    return own_code(s) or transform(s).amplified


def masked(s) -> bool:
    return transform(s).masked


def sepa(s) -> bool:
    return own_code(s) or transform(s).uses_sepa_controller


def planned(s) -> bool:
    return own_code(s) or transform(s).needs_planning


def by_anchors(s) -> bool:
    return planned(s) and s.algorithm.planning.detector == "anchors"


def by_grams(s) -> bool:
    return planned(s) and s.algorithm.planning.detector == "grams"


def canonical(s) -> bool:
    return s.algorithm.canonical_transform


def gtpo_canonical(s) -> bool:
    return s.algorithm.transform_mode == "gtpo_canonical"


def grpo_s(s) -> bool:
    return s.algorithm.transform_mode == "grpo_s"


def own_outcome(s) -> bool:
    return s.algorithm.advantage_mode not in OUTCOME_OPERATORS


def own_transform(s) -> bool:
    return s.algorithm.own_transform or canonical_kind(s.algorithm.uncertainty_kind) is None


def own_algorithm(s) -> bool:
    return s.algorithm.algorithm_mode is not None


def turn_loss(s) -> bool:
    return s.loss is not None


def scaled_clip(s) -> bool:
    return s.loss is not None and bool(s.loss.dynamic_clip)


def searches(s) -> bool:
    return s.search.max_searches > 0
