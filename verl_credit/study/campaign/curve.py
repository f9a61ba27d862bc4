"""The area under a learning curve: one number for a run."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


class NoArea(ValueError):
    """The curve has no area over the window; the message says why."""


def area(steps: Sequence[int], values: Sequence[float], first: int, last: int) -> float:
    """The mean height of the curve between the steps ``first`` and ``last``.

        area = 1 / (last - first) * integral from first to last of the line through (step, value)

    Trapezoids; where the window ends between two steps, the curve is interpolated. A constant curve gives its constant.
    ``steps`` increase. Errors: NoArea for a curve that does not cover the window: nothing is extrapolated.
    """
    if not first < last:
        raise NoArea(f"window {first} to {last}: expected a first step below the last")
    if not len(steps):
        raise NoArea("no values")
    if steps[0] > first or steps[-1] < last:
        raise NoArea(f"values from step {steps[0]} to {steps[-1]} do not cover the window {first} to {last}")
    if steps[-1] > 1 << 53:
        raise NoArea("a step above 2**53, which no run has made")
    ends = np.interp([first, last], steps, values)
    inside = [(s, v) for s, v in zip(steps, values, strict=True) if first < s < last]
    x = [first, *(s for s, _ in inside), last]
    y = [ends[0], *(v for _, v in inside), ends[1]]
    return float(np.trapezoid(y, x) / (last - first))
