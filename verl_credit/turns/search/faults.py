"""The faults of a search: their codes, whether and when a request is retried, and whether the server is at fault."""

import random
import time
from email.utils import parsedate_to_datetime

from verl_credit.redact import redact

FAULT_CODES = ("connect", "deadline", "overload", "http_4xx", "http_5xx", "bad_answer", "breaker_open")
FIRST_SECONDS = 0.05
MOST_SECONDS = 2.0


class SearchFault(Exception):
    """A search that failed for a reason outside the policy; counted as credit/tool/fault_CODE.

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


def retry_after_pause(retry_after: str | None, jitter: random.Random, now: float | None = None) -> float:
    """Seconds of a Retry-After header, which is whole seconds or an HTTP date, times U(1, 1.25).

    0 without a header, for one that is neither, and for a past date. `now`: seconds since 1970.
    """
    text = (retry_after or "").strip()
    if text.isascii() and text.isdigit():
        seconds = float(text)
    else:
        try:
            date = parsedate_to_datetime(text).timestamp()
        except (ValueError, TypeError, OverflowError):
            return 0.0
        seconds = max(0.0, date - (time.time() if now is None else now))
    return seconds * jitter.uniform(1.0, 1.25)
