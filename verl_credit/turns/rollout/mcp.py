"""Tools of MCP servers: the keys of ``config`` in a tool file, and a request to such a server through the official SDK."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, fields
from typing import Any

from verl_credit.errors import ConfigError, PreflightError, unknown_key
from verl_credit.redact import redact
from verl_credit.turns.rollout.search.faults import SearchFault

MCP_SERVER = "MCP server "
"""The texts of faults and refusals begin so."""


class Refused(Exception):
    """The server does not take the arguments, which the policy wrote."""


@dataclass(frozen=True)
class ToolSettings:
    """The keys of ``config``."""

    type: str = "native"
    """verl's. It has no other type."""
    url: str | None = None
    """The address of a server with streamable HTTP."""
    command: Sequence[str] = ()
    """The command of a server that speaks over its input and output, as a list of texts. Every call starts one."""
    tool: str | None = None
    """The tool's name at the server. null: its only tool."""
    name: str | None = None
    """The name under which the policy calls it. null: its name at the server."""
    headers: Mapping | None = None
    """Maps headers to the names of environment variables, which hold their values."""
    env: list | None = None
    """Names of the environment variables that the command reads, beside PATH, HOME and others of this kind."""
    timeout_s: float = 20.0
    """The deadline of a call, the connection included, in seconds."""
    max_chars: int = 4000
    """Characters of a result that the policy reads."""

    @classmethod
    def read(cls, config: Mapping) -> ToolSettings:
        """Raises ConfigError for an unknown key and for a value that cannot be used."""
        names = [field.name for field in fields(cls)]
        for name in config:
            if name not in names:
                raise unknown_key("config", str(name), names)
        settings = cls(**config)
        url, command = str(settings.url or ""), settings.command
        if bool(url) == bool(command):
            use = "one of config.url, a server with streamable HTTP, and config.command, one to start"
            raise ConfigError(key="config.url", value=redact(url) or None, accepted=use)
        if url and not re.fullmatch(r"https?://[^/@?\s]+(/[^@?\s]*)?", url):
            use = "http://HOST:PORT/PATH without a password or a query: secrets are in config.headers"
            raise ConfigError(key="config.url", value=redact(url), accepted=use)
        if command and not (isinstance(command, list) and all(isinstance(part, str) for part in command)):
            raise ConfigError(key="config.command", value=command, accepted="a list of texts")
        named = {"headers": list((settings.headers or {}).values()), "env": settings.env or []}
        for key, variables in named.items():
            if not all(isinstance(name, str) and name.isidentifier() for name in variables):
                # The value is not shown: it may be the secret itself.
                use = "names of environment variables, which hold the values"
                raise ConfigError(key=f"config.{key}", value=variables, shown="...", accepted=use)
        for key, least in (("timeout_s", 0.001), ("max_chars", 1)):
            value = getattr(settings, key)
            if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value < 1e9:
                raise ConfigError(
                    key=f"config.{key}", value=value, accepted=f"a number of at least {least:g}"
                )
        return settings

    def __str__(self) -> str:
        return f"{MCP_SERVER}{self.url or self.command[0]}"

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
