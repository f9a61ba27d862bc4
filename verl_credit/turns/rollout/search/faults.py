"""The faults of a search: their codes, when a request is retried, and the breakers that spare servers which keep failing."""

import random
import time
from collections.abc import Callable

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
    that were sent. `blames_server`: it counts for the circuit breaker; 4xx, 429 included, does not, because healthy
    servers send it. `retry_after`: the header of that name.
    """

    def __init__(
        self,
        code: str,
        detail: str,
        attempts: int = 1,
        *,
        blames_server: bool = True,
        retry_after: str | None = None,
    ):
        detail = redact(detail)  # it contains the server's address, which may hold a password
        super().__init__(code, detail, attempts)
        self.code, self.detail, self.attempts = code, detail, attempts
        self.blames_server, self.retry_after = blames_server, retry_after

    def __str__(self) -> str:
        return f"{self.code}: {self.detail}"


AGAIN = ("connect", "overload")
"""Codes of faults after which a request is retried. After 500 it is not: a query that breaks the encoder breaks it on every
server."""


def fault_of_status(status: int, detail: str, retry_after: str | None) -> SearchFault:
    """The fault of an answer with a status other than 200."""
    codes = {429: "overload", 503: "overload", 504: "deadline"}
    code = codes.get(status, {4: "http_4xx", 5: "http_5xx"}.get(status // 100, "bad_answer"))
    blames_server = status // 100 != 4
    return SearchFault(
        code, f"status {status}: {detail}", blames_server=blames_server, retry_after=retry_after
    )


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
