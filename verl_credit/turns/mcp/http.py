"""The SDK's streamable HTTP with our limits: no proxy of the environment, no answer of more than MOST_BYTES."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import httpx2
from mcp.client.streamable_http import streamable_http_client

from verl_credit.turns.search.connections import MOST_BYTES


@asynccontextmanager
async def connected(url: str, headers: dict, timeout_s: float, answered: Callable[[int], None]):
    """The SDK's streams. ``answered`` gets the status of every answer. The SDK itself ends an event of more than 1 MiB."""

    async def note(response) -> None:
        answered(response.status_code)

    client = httpx2.AsyncClient(
        headers={**headers, "Accept-Encoding": "identity"},
        timeout=httpx2.Timeout(
            timeout_s, read=None
        ),  # a stream of events may be silent; a call has its deadline
        transport=_Bounded(trust_env=False),
        event_hooks={"response": [note]},
        trust_env=False,
    )
    async with client, streamable_http_client(url, http_client=client) as streams:
        yield streams


class _Bounded(httpx2.AsyncHTTPTransport):
    async def handle_async_request(self, request):
        response = await super().handle_async_request(request)
        if (encoding := response.headers.get("Content-Encoding", "identity")) != "identity":
            await response.aclose()
            # a few bytes of it can become gigabytes
            raise httpx2.DecodingError(f"Content-Encoding: {encoding[:40]!r}; identity was asked for")
        if request.method == "POST":  # the stream of a GET lasts as long as the session
            response.stream = _Counted(response.stream)
        return response


class _Counted(httpx2.AsyncByteStream):
    def __init__(self, stream) -> None:
        self._stream = stream

    async def __aiter__(self) -> AsyncIterator[bytes]:
        size = 0
        async for piece in self._stream:
            size += len(piece)
            if size > MOST_BYTES:
                raise httpx2.StreamError(f"an answer of more than {MOST_BYTES >> 20} MiB")
            yield piece

    async def aclose(self) -> None:
        await self._stream.aclose()
