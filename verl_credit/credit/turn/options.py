"""The types of a mode's numeric options, each with its range."""

import math
from dataclasses import dataclass
from typing import Annotated, Any


@dataclass(frozen=True)
class Range:
    """Numbers from ``low`` to ``high``, whole ones where ``low`` is one."""

    low: float
    high: float = math.inf
    low_allowed: bool = True
    high_allowed: bool = False

    def check(self, name: str, value: Any) -> None:
        """Raise ValueError for a value outside the range."""
        whole = isinstance(self.low, int)
        number = isinstance(value, int if whole else int | float) and not isinstance(value, bool)
        if not number or not (
            self.low < value < self.high
            or (self.low_allowed and value == self.low)
            or (self.high_allowed and value == self.high)
        ):
            least = f"at least {self.low:g}" if self.low_allowed else f"above {self.low:g}"
            most = f" and {'at most' if self.high_allowed else 'below'} {self.high:g}"
            kind = "whole number" if whole else "number"
            most = "" if self.high == math.inf else most
            raise ValueError(f"{name}={value!r}: expected a {kind} {least}{most}")


AtLeastZero = Annotated[float, Range(0.0)]
Positive = Annotated[float, Range(0.0, low_allowed=False)]
BelowOne = Annotated[float, Range(0.0, 1.0)]
Share = Annotated[float, Range(0.0, 1.0, high_allowed=True)]
Count = Annotated[int, Range(0)]
Number = Annotated[int, Range(1)]


def refuse_unread(beside: str, why: str, **given: tuple[Any, Any]) -> None:
    """Raise ValueError for an option that another one leaves unread. ``given``: its value and its default, which passes."""
    for name, (value, default) in given.items():
        if value != default:
            raise ValueError(f"{name}={value!r} with {beside}: {why}; leave it at {default!r}")
