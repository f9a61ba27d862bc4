"""The sessions with MCP servers: one per server and process, in an event loop of their own.

verl makes tools outside any event loop and calls them inside one, and the SDK wants a session's begin and end in one task.
"""

from __future__ import annotations

import asyncio
import atexit
import threading
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import Any

from verl_credit.errors import PreflightError
from verl_credit.turns.mcp.settings import Server
from verl_credit.turns.search.faults import SearchFault

CLOSE_S = 5.0  # the SDK gives a command 4 seconds to end
MOST_TOOLS = 1000  # a server's list may have pages without end


class Refused(Exception):
    """The server does not take the arguments, which the policy wrote."""


class _Lost(Exception):
    """The connection ended, or there was none."""


@dataclass
class _Connection:
    opened: asyncio.Future
    """The SDK's client, once the server has answered."""
    closing: asyncio.Event
    keeper: asyncio.Task | None = None
    status: str = ""
    """The last answer's, where it is an error of HTTP."""
    unknown: bool = False
    """The server does not know the session any more: it answered 404, whatever the error in it."""

    def answered(self, status: int) -> None:
        self.status = f"status {status}" if status >= 400 else ""
        self.unknown |= status == 404

    def why(self, text: str) -> str:
        return f"{text} ({self.status})" if self.status else text


class Session:
    """A session that is opened by its first request, and opened again once when it was lost.

    `deadline`, `connect` and `bad_answer` of SearchFault are faults of the server. A call whose connection ends may reach
    the server twice.
    """

    _shared: dict[Server, Session] = {}

    def __init__(self, server: Server) -> None:
        self.server = server
        self._connection: _Connection | None = None

    @classmethod
    def of(cls, server: Server) -> Session:
        if server not in cls._shared:
            cls._shared[server] = cls(server)
        return cls._shared[server]

    def tools(self) -> list:
        """The tools. Raises SearchFault, PreflightError without the SDK, ConfigError for a variable that is not set."""
        require_sdk()
        self.server.secrets()
        return asyncio.run_coroutine_threadsafe(self._ask(_all_tools), _loop()).result()

    async def call(self, name: str, arguments: dict, meta: dict | None = None):
        """The SDK's result of a call. Errors: SearchFault, Refused."""

        def request(client):
            return client.call_tool(name, arguments, meta=meta)

        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self._ask(request), _loop()))

    def close(self) -> None:
        """Ends the session, and the server's process where there is one; the next request opens it again."""
        asyncio.run_coroutine_threadsafe(self._close(), _loop()).result(CLOSE_S)

    async def _ask(self, request: Callable[[Any], Awaitable]):
        try:
            async with asyncio.timeout(self.server.timeout_s):
                try:
                    return await self._answer(request)
                except _Lost:
                    return await self._answer(request)
        except TimeoutError:
            raise self._fault("deadline", f"no answer in {self.server.timeout_s:g} s") from None
        except _Lost as lost:
            raise self._fault("connect", str(lost)) from lost

    async def _answer(self, request):
        from mcp import MCPError
        from mcp.types import CONNECTION_CLOSED, INVALID_PARAMS

        here = self._connected()
        client = await asyncio.shield(here.opened)
        asked = asyncio.ensure_future(request(client))
        try:
            await asyncio.wait({asked, here.keeper}, return_when=asyncio.FIRST_COMPLETED)
            if not asked.done():
                raise _Lost(here.why("the connection ended"))
            return asked.result()
        except MCPError as error:
            if error.code == INVALID_PARAMS:
                raise Refused(str(error)) from error
            # An answer that was too long would be so again.
            closed = error.code == CONNECTION_CLOSED and "SSE stream failed" not in str(error)
            if closed or here.unknown:
                self._forget(here)
                raise _Lost(here.why(str(error))) from error
            raise self._fault("bad_answer", here.why(f"error {error.code}: {error}")) from error
        except (_Lost, asyncio.CancelledError):
            raise
        except Exception as error:  # the SDK checks results against their schemas
            raise self._fault("bad_answer", here.why(_first(error))) from error
        finally:
            asked.cancel()

    def _connected(self) -> _Connection:
        """The present connection, or a new one."""
        if self._connection is None or self._connection.keeper.done():
            here = _Connection(asyncio.get_running_loop().create_future(), asyncio.Event())
            here.keeper = asyncio.create_task(self._keep(here))
            self._connection = here
        return self._connection

    async def _keep(self, here: _Connection) -> None:
        """Holds a connection, begin and end in one task."""
        from mcp import Client

        try:
            async with (
                asyncio.timeout(self.server.timeout_s) as limit,
                Client(self._transport(here)) as client,
            ):
                limit.reschedule(None)
                here.unknown = False  # a server may answer 404 to a question for a later protocol
                here.opened.set_result(client)
                await here.closing.wait()
        except Exception as error:
            if not here.opened.done():
                here.opened.set_exception(_Lost(here.why(_first(error))))
        finally:
            here.opened.cancel()

    def _transport(self, here: _Connection):
        headers, env = self.server.secrets()
        if self.server.command:
            from mcp import StdioServerParameters, stdio_client

            command, *args = self.server.command
            return stdio_client(StdioServerParameters(command=command, args=args, env=env))
        from verl_credit.turns.mcp.http import connected

        return connected(self.server.url, headers, self.server.timeout_s, here.answered)

    def _forget(self, lost: _Connection) -> None:
        """Ends a connection, which another call may have replaced."""
        lost.closing.set()
        if self._connection is lost:
            self._connection = None

    async def _close(self) -> None:
        if (here := self._connection) is not None:
            here.closing.set()
            await asyncio.wait({here.keeper})

    def _fault(self, code: str, detail: str) -> SearchFault:
        return SearchFault(code, f"{self.server}: {detail}")


async def _all_tools(client) -> list:
    tools, cursor = [], None
    while len(tools) < MOST_TOOLS:
        page = await client.list_tools(cursor=cursor)
        tools += page.tools
        if (cursor := page.next_cursor) is None:
            break
    return tools


def require_sdk() -> None:
    """Raises PreflightError where the official SDK is not installed."""
    try:
        import mcp  # noqa: F401
        from mcp import Client  # noqa: F401
    except ImportError as error:
        raise PreflightError(
            f"MCP tools need the official SDK: pip install 'verl-credit[mcp]' ({error})"
        ) from error


def _first(error: BaseException) -> str:
    """The first error of a group of errors, in one line."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]


@cache
def _loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="mcp", daemon=True).start()
    atexit.register(_close_all)
    return loop


def _close_all() -> None:
    for session in Session._shared.values():
        with suppress(Exception):  # the process ends, and a command ends with its input
            session.close()
