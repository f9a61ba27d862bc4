"""Ends a run within a number of hours."""

from __future__ import annotations

import time
from collections.abc import Callable


class TimeLimit:
    """Decides after every step whether the next one must be the last.

    It must be when two more would not fit: elapsed + 2 s + tail > limit, with s the longest step so far and tail the
    longest saving plus the longest evaluation so far (s each until the first). A run ends within its limit unless its last
    step takes a whole step longer than all before. Seconds, except `hours`; `clock` is for tests.
    """

    def __init__(self, hours: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit_s, self._clock, self._start = hours * 3600.0, clock, clock()
        self._longest: dict[str, float] = {}

    def next_is_last(self, timing_s: dict[str, float]) -> bool:
        """`timing_s`: seconds of the step that has ended: "step" (saving included), "save_checkpoint", "testing"."""
        for name, seconds in timing_s.items():
            self._longest[name] = max(seconds, self._longest.get(name, 0.0))
        step = self._longest["step"]
        tail = self._longest.get("save_checkpoint", step) + self._longest.get("testing", step)
        return self._clock() - self._start + 2 * step + tail > self._limit_s
