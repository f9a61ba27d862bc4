"""The faults of a search: their codes, when a request is retried, and the breakers that spare servers which keep failing."""

import itertools
import random
import time
from collections.abc import Callable
from dataclasses import dataclass

from verl_credit.redact import redact

FAULT_CODES = ("connect", "deadline", "overload", "http_4xx", "http_5xx", "bad_answer", "breaker_open")
FIRST_SECONDS = 0.05
MOST_SECONDS = 2.0
FAILURES, PAUSE_S = 5, 5.0
"""A server is paused for PAUSE_S seconds after so many failures in a row; then one search tries it."""


class SearchFault(Exception):
    """A search, or a call of an MCP tool, that failed for a reason outside the policy; counted as credit/tool/fault_CODE.

    `code` is one of FAULT_CODES: "connect" no connection, or a broken one; "deadline" no answer in time, or 504;
    "overload" 429 or 503; "http_4xx" and "http_5xx" any other status of that kind; "bad_answer" any other answer
    without pages; "breaker_open" no request was sent, because every server had failed too often. `attempts`: requests
    that were sent.
    """

    def __init__(self, code: str, detail: str, attempts: int = 1):
        detail = redact(detail)  # it contains the server's address, which may hold a password
        super().__init__(code, detail, attempts)
        self.code, self.detail, self.attempts = code, detail, attempts

    def __str__(self) -> str:
        return f"{self.code}: {self.detail}"


class FailedAttempt(Exception):
    """A request that gave no pages.

    `again`: the request is retried, after a failed connection, 429 and 503. It is not after 500, because a query that
    breaks the encoder breaks it on every server. `blames_server`: the failure counts for the circuit breaker; 4xx,
    429 included, does not, because healthy servers send it.
    """

    def __init__(self, code: str, detail: str, *, again=False, blames_server=True, retry_after=None):
        super().__init__(redact(detail))
        self.code, self.again, self.blames_server = code, again, blames_server
        self.retry_after: str | None = retry_after

    @classmethod
    def of_status(cls, status: int, detail: str, retry_after: str | None) -> "FailedAttempt":
        """The failure for a status other than 200."""
        detail = f"status {status}: {detail}"
        if status in (429, 503):
            return cls("overload", detail, again=True, blames_server=status == 503, retry_after=retry_after)
        if status == 504:
            return cls("deadline", detail)
        if 500 <= status < 600:
            return cls("http_5xx", detail)
        if 400 <= status < 500:
            return cls("http_4xx", detail, blames_server=False)
        return cls("bad_answer", detail)


def backoff(attempt: int, jitter: random.Random) -> float:
    """Seconds to wait after failed attempt 0, 1, ...: min(2, 0.05 · 2^attempt) · U(1, 2).

    The random factor spreads the retries of searches that failed together.
    """
    return min(MOST_SECONDS, FIRST_SECONDS * 2**attempt) * jitter.uniform(1.0, 2.0)


def retry_after_pause(retry_after: str | None, jitter: random.Random) -> float:
    """Whole seconds of a Retry-After header, times U(1, 1.25); 0 without a header and for any other one."""
    text = (retry_after or "").strip()
    return float(text) * jitter.uniform(1.0, 1.25) if text.isascii() and text.isdigit() else 0.0


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

    def __init__(self, failures: int, pause_s: float, clock: Callable[[], float] = time.monotonic):
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

    `turns` counts the searches. `ready` maps the address of a server that sent Retry-After to the clock time when that is
    over.
    """

    def __init__(self, urls: list[str], clock: Callable[[], float]):
        self.servers = [Server(url, CircuitBreaker(FAILURES, PAUSE_S, clock)) for url in urls]
        self._clock, self.turns = clock, itertools.count()

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
