"""How fast a server answers, and the Retry-After it sends when its queue is full."""

import math

LONGEST_PAUSE_S = 60


class Pace:
    """A running mean of answered queries per second of work; idle time does not count."""

    def __init__(self, weight: float = 0.3):
        self._weight, self._last = weight, -math.inf
        self.queries_per_s: float | None = None

    def answered(self, queries: int, *, began: float, now: float) -> None:
        """Count a batch that began and ended at these times (seconds of one clock)."""
        # Batches overlap: the time before the last answer is already counted.
        seconds = max(now - max(began, self._last), 1e-6)
        self._last = now
        rate, old = queries / seconds, self.queries_per_s
        self.queries_per_s = rate if old is None else old + self._weight * (rate - old)

    def pause_s(self, waiting: int) -> int:
        """Whole seconds until `waiting` queries are answered: at least 1, at most 60, 1 before any answer."""
        if not self.queries_per_s:
            return 1
        return min(LONGEST_PAUSE_S, max(1, math.ceil(waiting / self.queries_per_s)))
