"""Tools of MCP servers: the keys of ``config`` in a tool file, and a request to such a server through the official SDK."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Annotated, Any

from annotated_types import Ge, Lt
from pydantic import model_validator

from verl_credit.config.keys.section import Part, declared
from verl_credit.errors import ConfigError, PreflightError
from verl_credit.redact import redact
from verl_credit.turns.rollout.search.faults import SearchFault

MCP_SERVER = "MCP server "
"""The texts of faults and refusals begin so."""


class Refused(Exception):
    """The server does not take the arguments, which the policy wrote."""


class ToolSettings(Part):
    """The keys of ``config``; the accepted values of each, for messages."""

    type: str = "native"
    """native: verl has no other type"""
    url: str | None = None
    """the address of a server with streamable HTTP"""
    command: list[str] | None = None
    """a list of texts: the command of a server that speaks over its input and output, started for every call"""
    tool: str | None = None
    """the tool's name at the server; null: its only tool"""
    name: str | None = None
    """the name under which the policy calls it; null: its name at the server"""
    headers: dict[str, Any] | None = None
    """a mapping of headers to the names of environment variables, which hold their values"""
    env: list[Any] | None = None
    """names of environment variables that the command reads, beside PATH, HOME and others of this kind"""
    timeout_s: Annotated[float, Ge(0.001), Lt(1e9)] = 20.0
    """a number of at least 0.001: the deadline of a call, the connection included, in seconds"""
    max_chars: Annotated[int, Ge(1)] = 4000
    """a whole number of at least 1: the characters of a result that the policy reads"""

    @classmethod
    def read(cls, config: Mapping) -> ToolSettings:
        """Raises ConfigError for an unknown key and for a value that cannot be used."""
        return declared(cls, dict(config), "config")

    @model_validator(mode="after")
    def _usable(self) -> ToolSettings:
        url = redact(self.url) if self.url else "null"
        if bool(self.url) == bool(self.command):
            raise ValueError(
                f"url={url}: one of url, a server with streamable HTTP, and command, one to start"
            )
        if self.url and not re.fullmatch(r"https?://[^/@?\s]+(/[^@?\s]*)?", self.url):
            accepted = "http://HOST:PORT/PATH without a password or a query: secrets are in headers"
            raise ValueError(f"url={url}: expected {accepted}")
        for key, names in (("headers", (self.headers or {}).values()), ("env", self.env or ())):
            if not all(isinstance(name, str) and name.isidentifier() for name in names):
                # The value is not shown: it may be the secret itself.
                raise ValueError(f"{key}: expected names of environment variables, which hold the values")
        return self

    def __str__(self) -> str:
        return f"{MCP_SERVER}{self.url or (self.command or [''])[0]}"

    def variable(self, key: str, name: str) -> str:
        """The value of an environment variable. Raises ConfigError where it is not set."""
        if value := os.environ.get(name):
            return value
        use = "this environment variable is not set, or empty; export it where the run is started, and on every node"
        raise ConfigError(key=f"config.{key}", value=name, accepted=use)


async def ask(settings: ToolSettings, request: Callable[[Any], Awaitable]):
    """The result of ``request(the SDK's client)``, in a session of its own.

    Errors: Refused; SearchFault with ``connect``, ``deadline`` or ``bad_answer``, which are faults of the server;
    PreflightError without the SDK; ConfigError for a variable that is not set.
    """
    try:
        from mcp import Client, MCPError
        from mcp.types import CONNECTION_CLOSED, INVALID_PARAMS
    except ImportError as missing:
        use = f"MCP tools need the official SDK: pip install 'verl-credit[mcp]' ({missing})"
        raise PreflightError(use) from missing
    code = "connect"
    try:
        async with (
            asyncio.timeout(settings.timeout_s),
            _transport(settings) as transport,
            Client(transport) as client,
        ):
            code = "bad_answer"
            return await request(client)
    except TimeoutError:
        detail = f"{settings}: no answer in {settings.timeout_s:g} s"
        raise SearchFault("deadline", detail) from None
    except ConfigError:
        raise
    except (
        Exception
    ) as raised:  # the SDK raises groups, errors of HTTP, and those of results that break their schema
        error: BaseException = raised
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        if isinstance(error, MCPError) and error.code == INVALID_PARAMS:
            raise Refused(str(error)) from raised
        if isinstance(error, OSError) or (isinstance(error, MCPError) and error.code == CONNECTION_CLOSED):
            code = "connect"
        detail = f"{settings}: {type(error).__name__}: {' '.join(str(error).split())}"[:300]
        raise SearchFault(code, detail) from raised


@asynccontextmanager
async def _transport(settings: ToolSettings):
    """What the SDK's client takes: a command, or streamable HTTP without the proxies of the environment."""
    if settings.command:
        from mcp import StdioServerParameters

        command, *args = settings.command
        env = {name: settings.variable("env", name) for name in settings.env or ()}
        yield StdioServerParameters(command=command, args=args, env=env)
        return
    import httpx2
    from mcp.client.streamable_http import streamable_http_client

    headers = {key: settings.variable("headers", name) for key, name in (settings.headers or {}).items()}
    # A stream of events may be silent; a call has its deadline.
    timeout = httpx2.Timeout(settings.timeout_s, read=None)
    async with httpx2.AsyncClient(headers=headers, timeout=timeout, trust_env=False) as client:
        yield streamable_http_client(str(settings.url), http_client=client)
