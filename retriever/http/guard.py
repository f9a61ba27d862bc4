"""ASGI middleware that checks host, token and body before the app reads a request."""

import asyncio
import hmac
import time
from collections.abc import Collection
from urllib.parse import urlsplit

from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse

from verl_credit_retriever.http.metrics import ServerMetrics

OPEN_ROUTE = "/livez"  # a process supervisor needs no token for it
ROUTES = ("/retrieve", "/v1/search", "/livez", "/readyz", "/metrics", "/info", "/openapi.json")
BODY_SECONDS = 30.0
"""A body that has not arrived by then is given up."""
BODIES_AT_A_TIME = 8
"""The number of bodies of the largest size that may be arriving at the same time; the limit is their bytes in all."""


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
        self._arriving = 0

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

        headers = dict(scope["headers"])
        if refusal := self._refusal(route, headers):
            return await refusal(scope, receive, counted_send)
        body = _Body(self, receive, scope["arrived"] + BODY_SECONDS)
        try:
            await self._app(scope, body.receive, counted_send)
        finally:
            self.has_come(body)

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
            return JSONResponse({"error": self._too_large()}, 413)
        return None

    def take(self, body: "_Body", size: int) -> None:
        """Count bytes that have arrived. Errors: HTTPException, which FastAPI passes on; every other one it reports as a
        malformed body."""
        body.bytes += size
        self._arriving += size
        if body.bytes > self._max_body_bytes:
            raise HTTPException(413, self._too_large(), CLOSE)
        if self._arriving > BODIES_AT_A_TIME * self._max_body_bytes:
            raise HTTPException(503, "too many bodies arrive at a time", {"Retry-After": "1", **CLOSE})

    def has_come(self, body: "_Body") -> None:
        """The bytes of a body that is complete, or given up, are no longer arriving."""
        self._arriving -= body.bytes
        body.bytes = 0

    def _too_large(self) -> str:
        return f"body: more than {self._max_body_bytes} bytes, which is the limit"


CLOSE = {"Connection": "close"}
"""The rest of the body may still arrive; it looks like a next request."""


class _Body:
    """The body of one request: its size so far, and when it must be complete."""

    def __init__(self, guard: Guard, receive, deadline: float):
        self._guard, self._receive, self._deadline = guard, receive, deadline
        self.bytes, self._complete = 0, False

    async def receive(self):
        if self._complete:  # the app waits for the client's end
            return await self._receive()
        try:
            async with asyncio.timeout_at(self._deadline):
                message = await self._receive()
        except TimeoutError:
            raise HTTPException(408, f"body: not complete after {BODY_SECONDS:g} s", CLOSE) from None
        self._complete = not message.get("more_body", False)
        self._guard.take(self, len(message.get("body", b"")))
        if self._complete:
            self._guard.has_come(self)
        return message


def _name(host: bytes) -> str:
    """The name of a Host header, lower case, without its port and brackets; "" for what is none."""
    try:
        return urlsplit(f"//{host.decode('ascii')}").hostname or ""
    except ValueError:
        return ""
