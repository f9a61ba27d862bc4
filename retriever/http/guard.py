"""ASGI middleware that checks the token and the body size before the app reads a request."""

import asyncio
import hmac
import time

from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse

from verl_credit_retriever.http.metrics import ServerMetrics

OPEN_ROUTE = "/livez"  # a process supervisor needs no token for it
ROUTES = ("/retrieve", "/v1/search", "/livez", "/readyz", "/metrics", "/info", "/openapi.json")


class Guard:
    """Checks the bearer token (401) and the body size (413), and counts and times every answer.

    With a token every route except /livez requires `Authorization: Bearer TOKEN`, compared in constant time. A body
    over `max_body_bytes` is refused by its Content-Length, or once more bytes have arrived. `scope["arrived"]` is
    the event loop's time when the request began.
    """

    def __init__(self, app, *, token: str | None, max_body_bytes: int, metrics: ServerMetrics):
        self._app, self._metrics, self._max_body_bytes = app, metrics, max_body_bytes
        self._credentials = None if token is None else f"Bearer {token}".encode()

    async def __call__(self, scope, receive, send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        scope["arrived"] = asyncio.get_running_loop().time()
        start, route = time.perf_counter(), scope["path"] if scope["path"] in ROUTES else "other"

        async def counted_send(message) -> None:
            if message["type"] == "http.response.start":
                self._metrics.requests.labels(route, message["status"]).inc()
                self._metrics.request_seconds.labels(route).observe(time.perf_counter() - start)
            await send(message)

        headers = dict(scope["headers"])
        if refusal := self._refusal(route, headers):
            return await refusal(scope, receive, counted_send)
        await self._app(scope, self._bounded(receive), counted_send)

    def _refusal(self, route: str, headers: dict[bytes, bytes]) -> JSONResponse | None:
        if self._credentials is not None and route != OPEN_ROUTE:
            given = headers.get(b"authorization", b"")
            if not hmac.compare_digest(given, self._credentials):
                problem = {"error": "Authorization: expected 'Bearer' and this server's token"}
                return JSONResponse(problem, 401, {"WWW-Authenticate": "Bearer"})
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and int(length[:20]) > self._max_body_bytes:
            return JSONResponse({"error": self._too_large()}, 413)
        return None

    def _bounded(self, receive):
        total = 0

        async def bounded_receive():
            nonlocal total
            message = await receive()
            total += len(message.get("body", b""))
            if total > self._max_body_bytes:
                # FastAPI passes this exception on, but reports every other one as a malformed body.
                raise HTTPException(413, self._too_large())
            return message

        return bounded_receive

    def _too_large(self) -> str:
        return f"body: more than {self._max_body_bytes} bytes, which is the limit"
