"""What a server refuses before its app reads a request: hosts, tokens, and bodies."""

import asyncio
import hmac
import time
from collections.abc import Collection
from urllib.parse import urlsplit

from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse

from verl_credit_retriever.http.metrics import ServerMetrics

OPEN_ROUTE = "/livez"  # a process supervisor needs no token for it
ROUTES = ("/retrieve", "/livez", "/readyz", "/metrics", "/info")
CLOSE = {"Connection": "close"}
"""The rest of the body may still arrive; it looks like a next request."""


class Guard:
    """Checks a request before the app reads it, and counts and times every answer.

    421: its Host is none of `hosts` (None: any), so that no web page can reach this server by a name of its own.
    401: with a token every route except /livez requires `Authorization: Bearer TOKEN`, compared in constant time. 413: its
    body is over `max_body_bytes`, by its Content-Length or once more bytes have arrived. While `state.draining` every
    answer closes its connection.
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
        size = 0  # bytes of this body so far

        async def counted_receive():
            nonlocal size
            message = await receive()
            size += len(message.get("body", b""))
            # FastAPI passes an HTTPException on; every other error it reports as a malformed body.
            if size > self._max_body_bytes:
                raise HTTPException(413, self._too_large, CLOSE)
            return message

        await self._app(scope, counted_receive, counted_send)

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
