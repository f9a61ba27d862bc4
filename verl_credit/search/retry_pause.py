"""How long to wait before a request is tried again."""

import random
import time
from email.utils import parsedate_to_datetime

FIRST_SECONDS = 0.05
MOST_SECONDS = 2.0


def backoff(attempt: int, jitter: random.Random) -> float:
    """Seconds after failed attempt 0, 1, ...: min(2, 0.05 · 2^attempt) · U(1, 2).

    The factor is drawn anew each time, so that searches which failed together do not come back together.
    """
    return min(MOST_SECONDS, FIRST_SECONDS * 2**attempt) * jitter.uniform(1.0, 2.0)


def asked_pause(retry_after: str | None, jitter: random.Random, now: float | None = None) -> float:
    """Seconds that a Retry-After header asks for, whole seconds or an HTTP date, times U(1, 1.25).

    0 without a header, for one that is neither, and for a date that has passed. `now`: seconds since 1970.
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
