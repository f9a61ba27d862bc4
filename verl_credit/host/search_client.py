"""Async client of a Search-R1-compatible retriever: a deadline, bounded retries, and faults with a code."""

import asyncio
import json
import math
import random
import time
from dataclasses import dataclass

import httpx

from .connections import Connections
from .pages import Page, format_pages, parse_answer

__all__ = ["FAULT_CODES", "Page", "SearchClient", "SearchFault", "SearchResult", "format_pages"]

FAULT_CODES = ("connect", "timeout", "http_5xx", "http_4xx", "bad_response")
# Retries per status; everything else is final. 500 may be a passing fault, but a query that breaks the
# encoder breaks it every time.
RETRIES_OF_STATUS = {429: math.inf, 502: math.inf, 503: math.inf, 500: 1}


class SearchFault(Exception):
    """A search that failed for a reason outside the policy. `code` is one of FAULT_CODES."""

    def __init__(self, code: str, detail: str):
        super().__init__(code, detail)
        self.code, self.detail = code, detail

    def __str__(self) -> str:
        return f"{self.code}: {self.detail}"


@dataclass(frozen=True)
class SearchResult:
    """Pages, best first (or shuffled), the number of attempts they took and the seconds over all of them."""

    pages: list[Page]
    attempts: int
    seconds: float


class SearchClient:
    """Searches `POST {url}/retrieve` of one server, or of several in turn.

    timeout_s bounds a whole search, its retries and the pauses between them included. Retried, at most
    `max_retries` times and on the next server: connection faults, 429, 502, 503, and 500 once; no other 4xx,
    no timeout, no malformed answer. With `shuffle_seed` the pages come in an order drawn from (seed, query):
    a control for policies that trust the rank instead of reading. The environment's proxies are not used.

    One client serves any number of concurrent searches and several event loops, each with connections of its
    own; it can be pickled (without them). Errors: ValueError for arguments, SearchFault from `search`.
    """

    def __init__(
        self,
        urls: list[str] | str,
        *,
        topk: int = 3,
        timeout_s: float = 10.0,
        max_retries: int = 2,
        max_page_chars: int = 1000,
        shuffle_seed: int | None = None,
    ):
        self.urls = [_endpoint(url) for url in ([urls] if isinstance(urls, str) else urls)]
        if not self.urls:
            raise ValueError("urls=[]; give the address of at least one retriever")
        least_of = {"topk": (topk, 1), "max_retries": (max_retries, 0), "max_page_chars": (max_page_chars, 1)}
        for name, (value, least) in least_of.items():
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"{name}={value!r}; expected an integer of at least {least}")
        if not 0 < timeout_s < math.inf:
            raise ValueError(f"timeout_s={timeout_s!r}; expected a positive number of seconds")
        self.topk, self.timeout_s, self.max_retries = topk, timeout_s, max_retries
        self.max_page_chars, self.shuffle_seed = max_page_chars, shuffle_seed
        self._reset()

    async def search(self, query: str) -> SearchResult:
        """The `topk` best pages for `query`. Errors: SearchFault, and cancellation passes."""
        start, last = time.monotonic(), None
        try:
            async with asyncio.timeout(self.timeout_s):
                for attempt in range(self.max_retries + 1):
                    try:
                        pages = await self._attempt(query)
                        return SearchResult(self._order(pages, query), attempt + 1, time.monotonic() - start)
                    except _Failure as failure:
                        last = failure
                        pause = self._pause(attempt, failure)
                        # A pause that outlives the deadline would only replace the reason by "timeout".
                        late = time.monotonic() + pause - start >= self.timeout_s
                        if attempt >= min(failure.retries, self.max_retries) or late:
                            raise SearchFault(failure.code, f"{failure} (attempt {attempt + 1})") from failure
                    await asyncio.sleep(pause)
        except TimeoutError:
            before = f"; before that: {last}" if last else ""
            raise SearchFault("timeout", f"no answer in {self.timeout_s:g} s{before}") from None
        raise AssertionError("unreachable: the last attempt returns or raises")

    def render(self, result: SearchResult) -> str:
        """`format_pages` with this client's `max_page_chars`."""
        return format_pages(result.pages, self.max_page_chars)

    async def check(self) -> None:
        """One real search on every server, for the start of a job. Errors: SearchFault names the server."""
        for url in self.urls:
            single = SearchClient(url, topk=self.topk, timeout_s=self.timeout_s, max_retries=0)
            try:
                await single.search("who founded the town by the river")
            except SearchFault as fault:
                raise SearchFault(fault.code, f"retriever {url}: {fault.detail}") from fault
            finally:
                await single.aclose()

    async def aclose(self) -> None:
        """Close this event loop's connections; a later search opens new ones."""
        connections = self._connections.pop(asyncio.get_running_loop(), None)
        if connections is not None:
            await connections.aclose()

    def _reset(self) -> None:
        # Connections belong to the event loop that opened them.
        self._connections: dict[asyncio.AbstractEventLoop, Connections] = {}
        self._jitter, self._next_url = random.Random(), 0

    def __getstate__(self) -> dict:
        return {
            key: value
            for key, value in self.__dict__.items()
            if key not in ("_connections", "_jitter", "_next_url")
        }

    def __setstate__(self, state: dict) -> None:
        self.__dict__.update(state)
        self._reset()

    def _own_connections(self) -> Connections:
        loop = asyncio.get_running_loop()
        if loop not in self._connections:
            for ended in [other for other in self._connections if other.is_closed()]:
                del self._connections[ended]
            # A share of the deadline for connecting leaves time for another server.
            share = self.timeout_s / (self.max_retries + 1)
            self._connections[loop] = Connections(connect_seconds=share)
        return self._connections[loop]

    async def _attempt(self, query: str) -> list[Page]:
        url = self.urls[self._next_url % len(self.urls)]
        self._next_url += 1
        # ASCII with escapes: a policy's query may hold what UTF-8 cannot, and the server is who refuses it.
        body = json.dumps({"queries": [query], "topk": self.topk, "return_scores": True})
        try:
            answer = await self._own_connections().post(url, body)
        except httpx.TransportError as error:
            raise _Failure("connect", f"{url}: {type(error).__name__} {error}", retries=math.inf) from error
        except httpx.HTTPError as error:
            raise _Failure("bad_response", f"{url}: {type(error).__name__} {error}") from error
        status = answer.status_code
        if status != 200:
            code = "http_5xx" if status >= 500 else "http_4xx" if status >= 400 else "bad_response"
            detail = f"{url}: status {status}: {answer.text[:200]}"
            raise _Failure(code, detail, RETRIES_OF_STATUS.get(status, 0), answer.headers.get("Retry-After"))
        try:
            return parse_answer(answer.json(), self.topk)
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise _Failure("bad_response", f"{url}: {error!r} in {answer.text[:200]!r}") from error

    def _pause(self, attempt: int, failure: "_Failure") -> float:
        wanted = failure.retry_after or ""
        asked = float(wanted) if wanted.isascii() and wanted.isdigit() else 0.0
        return max(asked, 0.05 * 2**attempt) * self._jitter.uniform(1.0, 2.0)

    def _order(self, pages: list[Page], query: str) -> list[Page]:
        if self.shuffle_seed is None:
            return pages
        # A string seed is hashed by random itself, equally in every process.
        return random.Random(f"{self.shuffle_seed}:{query}").sample(pages, len(pages))


class _Failure(Exception):
    """One failed attempt, and how often its kind may be retried."""

    def __init__(self, code: str, detail: str, retries: float = 0, retry_after: str | None = None):
        super().__init__(detail)
        self.code, self.retries, self.retry_after = code, retries, retry_after


def _endpoint(url: str) -> str:
    try:
        parts = httpx.URL(url)
    except (httpx.InvalidURL, TypeError) as error:
        raise ValueError(f"urls: {url!r}; expected http://HOST:PORT ({error})") from None
    if (
        parts.scheme not in ("http", "https")
        or not parts.host
        or parts.query
        or not 0 < (parts.port or 80) < 65536
    ):
        raise ValueError(f"urls: {url!r}; expected http://HOST:PORT")
    return url.rstrip("/") if parts.path.rstrip("/").endswith("/retrieve") else url.rstrip("/") + "/retrieve"
