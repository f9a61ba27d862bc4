"""Keep-alive HTTP connections of one event loop, one request on each at a time."""

import asyncio
import ssl
from collections import defaultdict
from collections.abc import Mapping
from contextlib import suppress
from functools import cache

import httpx

from verl_credit.address import without_password

# uvicorn closes idle connections after 5 s by default; ours are closed before that.
IDLE_SECONDS = 3.0


@cache
def _tls(scheme: str) -> ssl.SSLContext:
    """A cached context, because reading the certificates for https takes 20 ms. http needs none of them."""
    if scheme == "https":
        return httpx.create_ssl_context(trust_env=False)
    return ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)


class Connections:
    """Posts over one connection per concurrent post, at most `most`, and reuses idle connections.

    Every connection is its own httpx client: httpx's pool examines all of its connections for every request, which
    took several times longer than 64 concurrent searches. The environment's proxies are not used. Errors:
    httpx.HTTPError from `post`.
    """

    def __init__(self, *, connect_seconds: float, most: int = 256):
        self._timeout = httpx.Timeout(None, connect=connect_seconds)
        self._limits = httpx.Limits(
            max_connections=1, max_keepalive_connections=1, keepalive_expiry=IDLE_SECONDS
        )
        self._free = asyncio.Semaphore(most)
        self._idle: dict[str, list[httpx.AsyncClient]] = defaultdict(list)
        self._clients: list[httpx.AsyncClient] = []

    async def post(self, url: str, body: str, headers: Mapping[str, str] | None = None) -> httpx.Response:
        """POST a JSON body; waits for a connection when all are busy. The caller sets the deadline."""
        headers = {"Content-Type": "application/json", **(headers or {})}
        address, auth = without_password(url)
        async with self._free:
            client = self._idle[url].pop() if self._idle[url] else self._open(address)
            try:
                answer = await client.post(address, content=body, headers=headers, auth=auth)
            except asyncio.CancelledError:
                # httpx's pool can lose its connection, and the next post waits for ever
                with suppress(ValueError):  # aclose() came first
                    self._clients.remove(client)
                await client.aclose()
                raise
            except httpx.HTTPError:
                self._idle[url].append(client)  # httpx reconnects
                raise
            self._idle[url].append(client)
            return answer

    async def aclose(self) -> None:
        """Close all connections, busy ones included."""
        self._idle.clear()
        clients, self._clients = self._clients, []
        for client in clients:
            await client.aclose()

    def _open(self, address: httpx.URL) -> httpx.AsyncClient:
        client = httpx.AsyncClient(
            timeout=self._timeout, limits=self._limits, trust_env=False, verify=_tls(address.scheme)
        )
        self._clients.append(client)
        return client
