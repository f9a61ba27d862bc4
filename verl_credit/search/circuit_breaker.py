"""A circuit breaker: a server that keeps failing is left alone for a while."""

import math
import time
from collections.abc import Callable


class CircuitBreaker:
    """Closed, it lets every request through; `failures` in a row open it, and it refuses all of them.

    `pause_s` after it opened, one request goes through as a probe (half-open), the others are still refused: if
    the probe succeeds the breaker closes, if it fails the pause begins anew. A request gets a ticket from `enter`
    and hands it back with its outcome, exactly once.

    In a row means one after the other: a failure counts when its request began after the last failure that
    counted. 60 searches that fail together count once, because one broken worker process takes many with it, and
    the server may be well. While it is open the probe alone decides; what began before says nothing about now.

    `clock` gives seconds that never go back. For one event loop: nothing here is locked.
    """

    def __init__(
        self, *, failures: int = 5, pause_s: float = 5.0, clock: Callable[[], float] = time.monotonic
    ):
        if isinstance(failures, bool) or not isinstance(failures, int) or failures < 1:
            raise ValueError(f"breaker_failures={failures!r}; expected an integer of at least 1")
        if not 0 < pause_s < math.inf:
            raise ValueError(f"breaker_pause_s={pause_s!r}; expected a positive number of seconds")
        self._limit, self._pause_s, self._clock = failures, pause_s, clock
        self._in_a_row = 0
        self._counted = 0  # failures that ever counted; a ticket is its value when the request began
        self._opened_at: float | None = None
        self._probing = False

    @property
    def refuses(self) -> bool:
        """Whether a request would be refused now: the pause is not over, or the probe is under way."""
        if self._opened_at is None:
            return False
        return self._probing or self._clock() - self._opened_at < self._pause_s

    def enter(self) -> int | None:
        """A ticket for one request, or None: refused."""
        if self.refuses:
            return None
        self._probing = self._opened_at is not None
        return self._counted

    def succeeded(self, ticket: int) -> None:
        """The server did its work."""
        if self._opened_at is None or ticket == self._counted:
            self._in_a_row, self._opened_at, self._probing = 0, None, False

    def failed(self, ticket: int) -> None:
        """The server did not do its work."""
        if ticket != self._counted:
            return
        self._counted += 1
        self._in_a_row += 1
        if self._opened_at is not None or self._in_a_row >= self._limit:
            self._opened_at, self._probing = self._clock(), False

    def left(self, ticket: int) -> None:
        """The request was cancelled: its outcome is unknown, and the next one may be the probe."""
        if ticket == self._counted:
            self._probing = False
