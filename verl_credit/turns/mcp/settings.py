"""``config`` of an MCP tool in the tool file: which server, which of its tools, and the limits of a call."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields

from verl_credit.errors import ConfigError, unknown_key
from verl_credit.redact import redact

MCP_SERVER = "MCP server "
"""The texts of faults and refusals begin so."""
NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@dataclass(frozen=True)
class Server:
    """A server. Tools with equal ones share a session."""

    url: str = ""
    command: tuple[str, ...] = ()
    headers: tuple[tuple[str, str], ...] = ()
    """Name of a header, and of the environment variable with its value."""
    env: tuple[str, ...] = ()
    """The variables that the command's process gets, beside PATH, HOME and others of this kind."""
    timeout_s: float = 20.0

    def __str__(self) -> str:
        return f"{MCP_SERVER}{self.url or self.command[0]}"

    def secrets(self) -> tuple[dict[str, str], dict[str, str]]:
        """(headers, variables of the command) with their values. Raises ConfigError for a variable that is not set."""
        headers = {key: _variable(name, "config.headers") for key, name in self.headers}
        return headers, {name: _variable(name, "config.env") for name in self.env}


@dataclass(frozen=True)
class ToolSettings:
    """The keys of ``config``."""

    type: str = "native"
    """verl's. It has no other type."""
    url: str | None = None
    """The address of a server with streamable HTTP."""
    command: list | None = None
    """The command of a server that speaks over its input and output, as a list of texts. Every worker starts one."""
    tool: str | None = None
    """The tool's name at the server. null: its only tool."""
    name: str | None = None
    """The name under which the policy calls it. null: its name at the server."""
    headers: Mapping | None = None
    """Maps headers to the names of environment variables, which hold their values."""
    env: list | None = None
    """Names of the environment variables that the command reads."""
    timeout_s: float = 20.0
    """The deadline of a call and of a connection, in seconds."""
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
        if bool(settings.url) == bool(settings.command):
            use = "give config.url of a server with streamable HTTP, or config.command of one to start"
            shown = f"config.url={settings.url}, config.command={settings.command}: {use}"
            raise ConfigError(redact(shown), key="config.url", value=settings.url, accepted=use)
        if settings.url:
            _check_address(settings.url)
        if settings.command is not None and not _texts(settings.command):
            raise ConfigError(key="config.command", value=settings.command, accepted="a list of texts")
        for key, given in (("headers", list((settings.headers or {}).values())), ("env", settings.env or [])):
            if not all(isinstance(name, str) and NAME.fullmatch(name) for name in given):
                # The value is not shown: it may be the secret itself.
                use = "names of environment variables, which hold the values"
                raise ConfigError(key=f"config.{key}", value=given, shown="...", accepted=use)
        for key, least in (("timeout_s", 0.001), ("max_chars", 1)):
            value = getattr(settings, key)
            if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value < 1e9:
                use = f"a number of at least {least:g}"
                raise ConfigError(key=f"config.{key}", value=value, accepted=use)
        return settings

    @property
    def server(self) -> Server:
        headers = tuple((str(key), name) for key, name in (self.headers or {}).items())
        command, env = tuple(self.command or ()), tuple(self.env or ())
        return Server((self.url or "").rstrip("/"), command, headers, env, self.timeout_s)


def _texts(given: object) -> bool:
    return isinstance(given, list) and bool(given) and all(isinstance(part, str) for part in given)


def _check_address(url: object) -> None:
    import httpx

    use = "expected http://HOST:PORT/PATH or https://HOST/PATH, without a password or a query: secrets are in config.headers"
    try:
        address = httpx.URL(url)
    except (httpx.InvalidURL, TypeError) as error:
        raise ConfigError(key="config.url", value=redact(url), accepted=f"{use} ({error})") from None
    if address.scheme not in ("http", "https") or not address.host or address.userinfo or address.query:
        raise ConfigError(key="config.url", value=redact(url), accepted=use)


def _variable(name: str, key: str) -> str:
    """The value of an environment variable. Raises ConfigError where it is not set."""
    if value := os.environ.get(name):
        return value
    use = "this environment variable is not set, or empty; export it where the run is started, and on every node"
    raise ConfigError(key=key, value=name, accepted=use)
