"""What a server refuses before its app reads a request: connections, slow headers, hosts, tokens, and bodies."""

import asyncio
import hmac
import logging
import resource
import time
from collections.abc import Collection
from contextlib import suppress
from urllib.parse import urlsplit

from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from verl_credit_retriever.http.metrics import ServerMetrics

OPEN_ROUTE = "/livez"  # a process supervisor needs no token for it
ROUTES = ("/retrieve", "/v1/search", "/livez", "/readyz", "/metrics", "/info", "/openapi.json")
BODY_SECONDS = 30.0
"""A body that has not arrived by then is given up."""
BODIES_AT_A_TIME = 8
"""The number of bodies of the largest size that may be arriving at the same time; the limit is their bytes in all."""
CLOSE = {"Connection": "close"}
"""The rest of the body may still arrive; it looks like a next request."""
HEADER_SECONDS = 20.0
ACCEPTED_AT_A_TIME = 16
"""Connections that asyncio accepts before the protocol sees the first of them (it takes the server's backlog)."""
RESERVED_FILES = 64 + 4 * ACCEPTED_AT_A_TIME
"""Descriptors of no connection: libraries, the index's files, pipes; and connections that are being closed."""
MOST_FILES = 1 << 20
LOG_EVERY_S = 60.0
log = logging.getLogger("verl_credit_retriever")


class Guard:
    """Checks a request before the app reads it, and counts and times every answer.

    421: its Host is none of `hosts` (None: any), so that no web page can reach this server by a name of its own.
    401: with a token every route except /livez requires `Authorization: Bearer TOKEN`, compared in constant time. 413: its
    body is over `max_body_bytes`, by its Content-Length or once more bytes have arrived. 408: the body takes longer than
    BODY_SECONDS. 503: too many bytes of bodies are arriving. While `state.draining` every answer closes its connection.
    `scope["arrived"]` is the event loop's time when the request began.
    """

    def __init__(
        self,
        app,
        *,
        state,
        token: str | None,
        hosts: Collection[str] | None,
        max_body_bytes: int,
        metrics: ServerMetrics,
    ):
        self._app, self._state, self._hosts = app, state, hosts
        self._metrics, self._max_body_bytes = metrics, max_body_bytes
        self._token = None if token is None else token.encode()
        self._too_large = f"body: more than {max_body_bytes} bytes, which is the limit"
        self._arriving = 0  # bytes so far of all bodies that are not complete

    async def __call__(self, scope, receive, send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        scope["arrived"] = asyncio.get_running_loop().time()
        start, route = time.perf_counter(), scope["path"] if scope["path"] in ROUTES else "other"

        async def counted_send(message) -> None:
            if message["type"] == "http.response.start":
                self._metrics.requests.labels(route, message["status"]).inc()
                self._metrics.request_seconds.labels(route).observe(time.perf_counter() - start)
                if self._state.draining:
                    message["headers"] = [*message.get("headers", ()), (b"connection", b"close")]
            await send(message)

        if refusal := self._refusal(route, dict(scope["headers"])):
            return await refusal(scope, receive, counted_send)
        size, complete = 0, False  # bytes of this body so far, and whether it has ended

        async def counted_receive():
            nonlocal size, complete
            if complete:  # the app waits for the client's end
                return await receive()
            try:
                async with asyncio.timeout_at(scope["arrived"] + BODY_SECONDS):
                    message = await receive()
            except TimeoutError:
                raise HTTPException(408, f"body: not complete after {BODY_SECONDS:g} s", CLOSE) from None
            complete, more = not message.get("more_body", False), len(message.get("body", b""))
            size += more
            self._arriving += more
            # FastAPI passes an HTTPException on; every other error it reports as a malformed body.
            if size > self._max_body_bytes:
                raise HTTPException(413, self._too_large, CLOSE)
            if self._arriving > BODIES_AT_A_TIME * self._max_body_bytes:
                raise HTTPException(503, "too many bodies arrive at a time", {"Retry-After": "1", **CLOSE})
            if complete:
                self._arriving, size = self._arriving - size, 0
            return message

        try:
            await self._app(scope, counted_receive, counted_send)
        finally:
            self._arriving -= size

    def _refusal(self, route: str, headers: dict[bytes, bytes]) -> JSONResponse | None:
        if self._hosts is not None and _name(headers.get(b"host", b"")) not in self._hosts:
            problem = f"Host: expected one of {', '.join(sorted(self._hosts))}, with any port"
            return JSONResponse({"error": problem}, 421)
        if self._token is not None and route != OPEN_ROUTE:
            scheme, _, given = headers.get(b"authorization", b"").partition(b" ")
            right = hmac.compare_digest(given.strip(b" "), self._token)
            if not (right and scheme.lower() == b"bearer"):
                problem = {"error": "Authorization: expected 'Bearer' and this server's token"}
                return JSONResponse(problem, 401, {"WWW-Authenticate": "Bearer"})
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and int(length[:20]) > self._max_body_bytes:
            return JSONResponse({"error": self._too_large}, 413)
        return None


def _name(host: bytes) -> str:
    """The name of a Host header, lower case, without its port and brackets; "" for what is none."""
    try:
        return urlsplit(f"//{host.decode('ascii')}").hostname or ""
    except ValueError:
        return ""


def most_connections() -> int:
    """How many connections this process can hold, once its soft limit of open files is its hard one, or a million."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_FILES)
    if wanted > soft != resource.RLIM_INFINITY:
        with suppress(ValueError, OSError):  # the kernel may allow fewer than the hard limit
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            soft = wanted
    return max(1, (MOST_FILES if soft == resource.RLIM_INFINITY else soft) - RESERVED_FILES)


def limited(most: int, header_seconds: float = HEADER_SECONDS) -> type[asyncio.Protocol]:
    """The protocol of one server process.

    A connection above `most` is closed at once; with a log line at most once a minute. So is a connection whose headers are
    not complete after `header_seconds`, counted from the connection or from the first byte of its next request.
    """
    last_warning = -LOG_EVERY_S

    class LimitedProtocol(AutoHTTPProtocol):
        _refused, _headers_due = False, None

        def connection_made(self, transport) -> None:
            nonlocal last_warning
            self._refused = len(self.connections) >= most
            if not self._refused:
                super().connection_made(transport)
                return self._await_headers()
            transport.abort()
            if time.monotonic() - last_warning >= LOG_EVERY_S:
                last_warning = time.monotonic()
                log.warning("%d connections are open, which is the limit; further ones are closed", most)

        def data_received(self, data: bytes) -> None:
            if self._refused:
                return
            super().data_received(data)
            if self.cycle is None or self.cycle.response_complete:
                self._await_headers()
            else:
                self._headers_have_come()

        def connection_lost(self, error) -> None:
            self._headers_have_come()
            if not self._refused:
                super().connection_lost(error)

        def on_response_complete(self) -> None:
            self._headers_have_come()  # a pipelined request has sent its own; uvicorn's time for an idle connection begins
            super().on_response_complete()

        def _await_headers(self) -> None:
            if self._headers_due is None:
                self._headers_due = self.loop.call_later(header_seconds, self.transport.abort)

        def _headers_have_come(self) -> None:
            if self._headers_due is not None:
                self._headers_due.cancel()
                self._headers_due = None

    return LimitedProtocol
