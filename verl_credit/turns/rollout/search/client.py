"""Async client of a Search-R1-compatible retriever with one deadline, bounded retries and fault codes."""

import asyncio
import itertools
import json
import math
import os
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import httpx

from verl_credit.address import endpoint, urls_of, without_password
from verl_credit.turns.rollout.search.connections import ask, start_of
from verl_credit.turns.rollout.search.faults import (
    AGAIN,
    FAILURES,
    PAUSE_S,
    CircuitBreaker,
    SearchFault,
    backoff,
    fault_of_status,
    retry_after_pause,
)
from verl_credit.turns.rollout.search.wire import Page, format_pages, parse_answer

INDEX_HEADER = "X-Index-Fingerprint"
# uvicorn closes idle connections after 5 s by default; ours are closed before that. The pool has no bound: httpx can lose
# the place of a request that was cancelled.
LIMITS = httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=3.0)
PROTOCOL = 'POST {"queries": [...], "topk": 3, "return_scores": true}'


@dataclass(frozen=True)
class SearchResult:
    """Pages, best first, the number of attempts, and the seconds that all attempts took."""

    pages: list[Page]
    attempts: int
    seconds: float


class SearchClient:
    """Searches `POST {url}/retrieve` of one server, or of several in turn.

    `timeout_s` bounds a whole search including retries and pauses. Every request carries the time that is left
    (X-Deadline-Ms), so that the server can drop expired requests. A failed connection, 429 and 503 are retried at most
    `max_retries` times, on the next server and after a pause (jittered and exponential, or Retry-After); other faults
    are not retried. A server that failed FAILURES times in a row gets no search for PAUSE_S seconds, then one as a probe
    (see CircuitBreaker); when this holds for all servers, a search fails at once. `token` is sent as a bearer token. With
    `index_fingerprint` an answer from another index is a fault: a server that once sent X-Index-Fingerprint must keep
    sending this value. A server that never sends the header is trusted, because Search-R1's servers do not have it. The
    environment's proxies are not used.

    One client serves concurrent searches and several event loops, each with its own connections. `clock`, `sleep` and
    `jitter` are for tests. Errors: ValueError for arguments, SearchFault from `search`.
    """

    def __init__(
        self,
        urls: list[str] | str,
        *,
        topk: int = 3,
        timeout_s: float = 10.0,
        max_retries: int = 2,
        max_page_chars: int = 1000,
        token: str | None = None,
        index_fingerprint: str | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        jitter: random.Random | None = None,
    ):
        self.urls = [endpoint(url) for url in ([urls] if isinstance(urls, str) else urls)]
        if not self.urls:
            raise ValueError("urls=[]; give the address of at least one retriever")
        sizes = (("topk", topk, 1), ("max_retries", max_retries, 0), ("max_page_chars", max_page_chars, 1))
        for name, value, least in sizes:
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"{name}={value!r}; expected an integer of at least {least}")
        if not 0 < timeout_s < math.inf:
            raise ValueError(f"timeout_s={timeout_s!r}; expected a positive number of seconds")
        if token is not None:  # the messages do not contain it
            if not token or any(not "!" <= character <= "~" for character in token):
                raise ValueError("token: expected printable ASCII without spaces")
            if any(httpx.URL(url).userinfo for url in self.urls):
                raise ValueError("token: an address has user and password; a request can have one")
        self.topk, self.timeout_s, self.max_retries = topk, timeout_s, max_retries
        self.max_page_chars, self._index_fingerprint, self._token = max_page_chars, index_fingerprint, token
        self._clock, self._sleep, self._jitter = clock, sleep, jitter or random.Random()
        self._pools: dict[asyncio.AbstractEventLoop, httpx.AsyncClient] = {}
        self._naming: set[str] = set()  # servers that have named their index
        self._failure = ""  # the last one, which a search that no breaker admits names
        self._breakers = {url: CircuitBreaker(FAILURES, PAUSE_S, clock) for url in self.urls}
        self._turns = itertools.count()  # successive searches begin at successive servers

    async def search(self, query: str) -> SearchResult:
        """The `topk` best pages for `query`. Errors: SearchFault."""
        begin, first = self._clock(), next(self._turns)
        end, fault = begin + self.timeout_s, None
        ready: dict[str, float] = {}  # the time when a server's Retry-After is over
        for attempt in range(self.max_retries + 1):
            left_s = end - self._clock()
            if fault is not None and left_s <= 0:
                break
            picked = self._pick(first + attempt, ready)
            if picked is None:
                break
            try:
                pages = await self._attempt(*picked, query, left_s)
                return SearchResult(pages, attempt + 1, self._clock() - begin)
            except SearchFault as failure:
                self._failure = failure.detail
                before = f"; before that: {fault}" if fault and failure.code == "deadline" else ""
                detail = f"{failure.detail} (attempt {attempt + 1}){before}"
                fault = SearchFault(failure.code, detail, attempt + 1)
                fault.__cause__ = failure
                if failure.code not in AGAIN or attempt == self.max_retries:
                    break
                ready[picked[0]] = self._clock() + retry_after_pause(failure.retry_after, self._jitter)
            pause_s = max(backoff(attempt, self._jitter), self._wait(ready))
            # Waiting until the deadline would only replace the fault by "deadline".
            if self._clock() + pause_s >= end:
                break
            await self._sleep(pause_s)
        if fault is None:
            detail = f"{', '.join(self.urls)}: failed too often just now; before that: {self._failure}"
            fault = SearchFault("breaker_open", detail, 0)
        raise fault

    def _pick(self, first: int, ready: dict[str, float]) -> tuple[str, int] | None:
        """(server, ticket of its breaker), tried in a circle from number `first` on, servers with a Retry-After last; None
        when every breaker refuses."""
        first, now = first % len(self.urls), self._clock()
        order = self.urls[first:] + self.urls[:first]
        for url in sorted(order, key=lambda url: max(ready.get(url, now), now)):
            if (ticket := self._breakers[url].enter()) is not None:
                return url, ticket
        return None

    def _wait(self, ready: dict[str, float]) -> float:
        """Seconds until the first server that may be asked is ready; at most 0 when one sent no Retry-After."""
        usable = [url for url in self.urls if not self._breakers[url].refuses] or self.urls
        now = self._clock()
        return min(ready.get(url, now) for url in usable) - now

    def render(self, result: SearchResult) -> str:
        """`format_pages` with this client's `max_page_chars`."""
        return format_pages(result.pages, self.max_page_chars)

    async def check(self) -> None:
        """Run one search on every server before a job starts. Errors: SearchFault names the server."""
        for url in self.urls:
            await self._post(url, "who founded the town by the river", self.timeout_s)

    async def aclose(self) -> None:
        """Close this event loop's connections; a later search opens new ones."""
        if pool := self._pools.pop(asyncio.get_running_loop(), None):
            await pool.aclose()

    def _pool(self) -> httpx.AsyncClient:
        """The connections of the event loop that opened them."""
        loop = asyncio.get_running_loop()
        if loop not in self._pools:
            self._pools = {other: pool for other, pool in self._pools.items() if not other.is_closed()}
            # Connecting may take a share of the deadline, which leaves time for another server.
            timeout = httpx.Timeout(None, connect=self.timeout_s / (self.max_retries + 1))
            self._pools[loop] = httpx.AsyncClient(timeout=timeout, limits=LIMITS, trust_env=False)
        return self._pools[loop]

    async def _attempt(self, url: str, ticket: int, query: str, left_s: float) -> list[Page]:
        """Pages from one server; reports the outcome to its breaker."""
        breaker = self._breakers[url]
        report = breaker.cancelled
        try:
            pages = await self._post(url, query, left_s, self._index_fingerprint)
            report = breaker.succeeded
            return pages
        except SearchFault as fault:
            report = breaker.failed if fault.blames_server else breaker.succeeded
            raise
        finally:
            report(ticket)

    async def _post(self, url: str, query: str, left_s: float, index: str | None = None) -> list[Page]:
        # json escapes to ASCII: a query may contain characters that UTF-8 cannot encode; the server refuses those.
        body = json.dumps({"queries": [query], "topk": self.topk, "return_scores": True})
        headers = {"Content-Type": "application/json", "X-Deadline-Ms": str(max(1, int(left_s * 1000)))}
        if self._token is not None:
            headers["Authorization"] = f"Bearer {self._token}"
        address, auth = without_password(url)
        try:
            async with asyncio.timeout(left_s):
                answer = await ask(self._pool(), "POST", address, headers=headers, content=body, auth=auth)
        except TimeoutError:
            raise SearchFault("deadline", f"{url}: no answer in {self.timeout_s:g} s") from None
        except httpx.HTTPError as error:
            code = "connect" if isinstance(error, httpx.TransportError) else "bad_answer"
            raise SearchFault(code, f"{url}: {type(error).__name__} {error}") from error
        if answer.status_code != 200:
            detail = f"{start_of(answer)} from {url}"
            if answer.status_code in (404, 405):
                detail += f"; it has no search by {PROTOCOL}, as Search-R1's servers do: is it a server of another kind?"
            raise fault_of_status(answer.status_code, detail, answer.headers.get("Retry-After"))
        served = answer.headers.get(INDEX_HEADER)
        if index is not None and (served is not None or url in self._naming):
            self._naming.add(url)
            if served != index:
                problem = (
                    f"answers from index {served[:80]!r}" if served else f"no longer sends {INDEX_HEADER}"
                )
                raise SearchFault("bad_answer", f"{url}: {problem}; search.index_fingerprint={index}")
        try:
            return parse_answer(json.loads(answer.content), self.topk)
        except (ValueError, RecursionError) as error:
            what = str(error) if type(error) is ValueError else f"{type(error).__name__} {error}"
            raise SearchFault("bad_answer", f"{url}: {what[:200]} in {start_of(answer)!r}") from error


def token_of(settings) -> str | None:
    """The token in the environment variable `search.token_env`. Raises ValueError when it is not set."""
    if settings.token_env is None:
        return None
    if token := os.environ.get(settings.token_env):
        return token
    raise ValueError(
        f"search.token_env={settings.token_env}: this environment variable is not set, or empty; "
        "export the servers' token in it where the run is started, and on every node"
    )


def client_for(settings) -> SearchClient:
    """The client for the search tool and for the check before the run. Raises ValueError."""
    names = ("topk", "timeout_s", "max_retries", "max_page_chars", "index_fingerprint")
    options = {name: getattr(settings, name) for name in names}
    return SearchClient(urls_of(settings), token=token_of(settings), **options)
