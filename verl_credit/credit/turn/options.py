"""The range of each numeric option, wherever a mode has it."""

import math
from typing import Any

# Option -> (smallest, largest, is the smallest allowed, is the largest allowed). Whole numbers where the smallest is one.
RANGES = {
    "gamma": (0.0, 1.0, True, True),
    "alpha": (0.0, math.inf, True, False),
    "clip_beta": (0.0, 1.0, True, False),
    "gain_scale": (0.0, math.inf, True, False),
    "outcome_scale": (0.0, math.inf, True, False),
    "ddof": (0, math.inf, True, False),
    "variance_floor": (0.0, math.inf, True, False),
    "eps": (0.0, math.inf, False, False),
    "outcome_weight": (0.0, math.inf, True, False),
    "outcome_gamma_power": (0, math.inf, True, False),
    "sigma_floor": (0.0, math.inf, False, False),
    "step_weight": (0.0, math.inf, True, False),
    "turn_weight": (0.0, math.inf, True, False),
    "progress_weight": (0.0, math.inf, True, False),
    "beta": (0.0, math.inf, True, False),
    "lam": (0.0, 1.0, True, True),
    "history_length": (0, math.inf, True, False),
    "length_weight_alpha": (0.0, math.inf, True, False),
    "weight_offset": (1, math.inf, True, False),
}


def check_range(name: str, value: Any) -> None:
    """Raise ValueError for a value outside its option's range; options without one are not looked at."""
    if name not in RANGES:
        return
    low, high, low_allowed, high_allowed = RANGES[name]
    whole = isinstance(low, int)
    number = isinstance(value, int if whole else int | float) and not isinstance(value, bool)
    if not number or not (
        low < value < high or (low_allowed and value == low) or (high_allowed and value == high)
    ):
        least = f"at least {low:g}" if low_allowed else f"above {low:g}"
        kind = "whole number" if whole else "number"
        most = "" if high == math.inf else f" and {'at most' if high_allowed else 'below'} {high:g}"
        raise ValueError(f"{name}={value!r}: expected a {kind} {least}{most}")


def refuse_unread(beside: str, why: str, **given: tuple[Any, Any]) -> None:
    """Raise ValueError for an option that another one leaves unread. ``given``: its value and its default, which passes."""
    for name, (value, default) in given.items():
        if value != default:
            raise ValueError(f"{name}={value!r} with {beside}: {why}; leave it at {default!r}")
