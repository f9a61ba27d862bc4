"""What can go wrong with a search: a code for every kind, whether it is tried again, and who is at fault."""

FAULT_CODES = ("connect", "deadline", "overload", "http_4xx", "http_5xx", "bad_answer", "breaker_open")


class SearchFault(Exception):
    """A search that failed for a reason outside the policy; counted as credit/tool/fault_CODE.

    `code` is one of FAULT_CODES: "connect" no connection, or one that broke; "deadline" no answer in time (504,
    the server's own word for it, included); "overload" 429 or 503; "http_4xx" and "http_5xx" any other status of
    that kind; "bad_answer" anything else that is not pages; "breaker_open" nothing was sent, because every server
    had just failed too often. `attempts`: requests that were sent.
    """

    def __init__(self, code: str, detail: str, attempts: int = 1):
        super().__init__(code, detail, attempts)
        self.code, self.detail, self.attempts = code, detail, attempts

    def __str__(self) -> str:
        return f"{self.code}: {self.detail}"


class FailedAttempt(Exception):
    """One request that gave no pages.

    Tried again (`again`): a connection that failed, 429 and 503. Not 500: a query that breaks the encoder breaks
    it on every server. Against the server (`blames_server`), for its circuit breaker: everything except what a
    healthy server says, which is 4xx, and 429 when it is busy.
    """

    def __init__(self, code: str, detail: str, *, again=False, blames_server=True, retry_after=None):
        super().__init__(detail)
        self.code, self.again, self.blames_server = code, again, blames_server
        self.retry_after: str | None = retry_after

    @classmethod
    def of_status(cls, status: int, detail: str, retry_after: str | None) -> "FailedAttempt":
        """The failure that a status other than 200 stands for."""
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
