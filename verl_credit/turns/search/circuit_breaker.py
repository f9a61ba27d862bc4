"""A circuit breaker, which sends no requests to a server that keeps failing, and the choice among a client's servers."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass


class CircuitBreaker:
    """A closed breaker admits every request; `failures` in a row open it, and it refuses all requests.

    `pause_s` after it opened, one request is admitted as a probe (half-open) and the others are still refused. The
    breaker closes if the probe succeeds; otherwise the pause begins again. A request gets a ticket from `enter` and
    reports its outcome with it exactly once.

    A failure counts only when its request began after the last counted failure. So 60 searches that fail together
    count once: one broken worker process fails many searches, and the server may be healthy. While the
    breaker is open, only the probe's outcome counts.

    `clock` is monotonic, in seconds. For one event loop: there are no locks.
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
        self._counted = 0  # all counted failures; a request's ticket is the value when it began
        self._opened_at: float | None = None
        self._probing = False

    @property
    def refuses(self) -> bool:
        """Would a request be refused now, because the pause lasts or a probe is running?"""
        if self._opened_at is None:
            return False
        return self._probing or self._clock() - self._opened_at < self._pause_s

    def enter(self) -> int | None:
        """A ticket for one request, or None when it is refused."""
        if self.refuses:
            return None
        self._probing = self._opened_at is not None
        return self._counted

    def succeeded(self, ticket: int) -> None:
        """Report that the server worked."""
        if self._opened_at is None or ticket == self._counted:
            self._in_a_row, self._opened_at, self._probing = 0, None, False

    def failed(self, ticket: int) -> None:
        """Report that the server failed."""
        if ticket != self._counted:
            return
        self._counted += 1
        self._in_a_row += 1
        if self._opened_at is not None or self._in_a_row >= self._limit:
            self._opened_at, self._probing = self._clock(), False

    def cancelled(self, ticket: int) -> None:
        """Report a request without an outcome; the next one may be the probe."""
        if ticket == self._counted:
            self._probing = False


@dataclass(frozen=True)
class Server:
    """A retriever: the address of its POST /retrieve, and its breaker."""

    url: str
    breaker: CircuitBreaker


class ServerList:
    """Successive searches begin at successive servers, and each search tries the servers in a circle.

    `ready` maps the address of a server that sent Retry-After to the clock time when that is over.
    """

    def __init__(self, urls: list[str], *, failures: int, pause_s: float, clock: Callable[[], float]):
        self.servers = [
            Server(url, CircuitBreaker(failures=failures, pause_s=pause_s, clock=clock)) for url in urls
        ]
        self._clock, self._turn = clock, 0

    def start(self) -> int:
        """The number of the server at which the next search begins."""
        self._turn += 1
        return self._turn - 1

    def pick(self, start: int, attempt: int, ready: dict[str, float]) -> tuple[Server, int] | None:
        """(server, ticket of its breaker); None when every breaker refuses.

        Servers are tried from number `start + attempt` on; servers with a Retry-After come last.
        """
        count, now = len(self.servers), self._clock()
        order = [self.servers[(start + attempt + offset) % count] for offset in range(count)]
        for server in sorted(order, key=lambda server: max(ready.get(server.url, now), now)):
            if (ticket := server.breaker.enter()) is not None:
                return server, ticket
        return None

    def wait(self, ready: dict[str, float]) -> float:
        """Seconds until the first server whose breaker is not open is ready: 0 when a server sent no Retry-After."""
        usable = [s for s in self.servers if not s.breaker.refuses] or self.servers
        now = self._clock()
        return max(0.0, min(ready.get(server.url, now) for server in usable) - now)
