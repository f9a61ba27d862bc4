"""How far a build is: rows, rate and time left."""

import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Progress:
    """`done` of `total` rows; `rate` in rows per second of this run, without what an earlier run had done."""

    done: int
    total: int
    rate: float

    @property
    def seconds_left(self) -> float:
        return (self.total - self.done) / self.rate if self.rate > 0 else float("inf")

    def text(self) -> str:
        """Such as "1,200 of 5,000 rows (24%), 310 rows/s, 0:00:13 left"."""
        share = 100 * self.done // self.total
        return (
            f"{self.done:,} of {self.total:,} rows ({share}%), {self.rate:,.0f} rows/s, {self._left()} left"
        )

    def _left(self) -> str:
        if self.seconds_left == float("inf"):
            return "unknown time"
        minutes, seconds = divmod(round(self.seconds_left), 60)
        return f"{minutes // 60}:{minutes % 60:02}:{seconds:02}"


class Meter:
    """Turns rows done into Progress. `resumed` rows were there at the start and do not count for the rate."""

    def __init__(
        self,
        total: int,
        resumed: int,
        report: Callable[[Progress], None] | None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._total, self._resumed, self._report, self._clock = total, resumed, report, clock
        self._start = clock()

    def at(self, done: int) -> None:
        elapsed = self._clock() - self._start
        rate = (done - self._resumed) / elapsed if elapsed > 0 else 0.0
        if self._report:
            self._report(Progress(done, self._total, rate))
