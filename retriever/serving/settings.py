"""The settings of one `serve`, which it also sends to its worker processes."""

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Self

from verl_credit_retriever.http.limits import Limits

LOOPBACK = ("127.0.0.1", "::1", "localhost")
TOKEN_VARIABLE = "VERL_CREDIT_RETRIEVER_TOKEN"


@dataclass(frozen=True)
class ServeSettings:
    """The command line of `serve`; the token is never shown. Errors: ValueError names the option."""

    index: Path
    encoder: Path
    host: str = "127.0.0.1"
    port: int = 0
    port_file: Path | None = None
    parent_pid: int | None = None
    threads: int | None = None
    device: str = "cpu"
    backend: str = "faiss"
    workers: int = 1
    verify: str = "known"
    """Of which files the hashes are computed: all, known (those that changed since this user last did), none."""
    index_pin: str | None = None
    """`manifest.fingerprint` of the one manifest that may be served; None: any."""
    mmap: bool = False
    gpu: bool = False
    nprobe: int | None = None
    refine: int | None = None
    ef_search: int | None = None
    limits: Limits = field(default_factory=Limits)
    token: str | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        for name in ("threads", "workers"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"--{name}={value}; at least 1")
        if not 0 <= self.port <= 65535:
            raise ValueError(f"--port={self.port}; expected 0 to 65535")

    @property
    def hosts(self) -> tuple[str, ...] | None:
        """The names that a Host header may have; None: any. Without a token a web page that a browser on this machine
        shows must not reach the server."""
        return LOOPBACK if self.token is None and self.host in LOOPBACK else None

    def to_json(self) -> str:
        """The settings for `from_json`, token included: send them through pipes only."""
        return json.dumps(asdict(self), default=str)

    @classmethod
    def from_json(cls, text: str) -> Self:
        values = json.loads(text)
        for name in ("index", "encoder", "port_file"):
            values[name] = values[name] and Path(values[name])
        return cls(**{**values, "limits": Limits(**values["limits"])})


def check_host(host: str, *, allow_remote: bool, token: bool) -> str | None:
    """A warning for a host that other machines can reach, None for loopback. Errors: ValueError if not allowed."""
    if host in LOOPBACK:
        return None
    if not allow_remote:
        raise ValueError(f"--host={host}: not loopback; add --allow-remote to serve other machines")
    if token:
        return f"warning: {host} is reachable by others; the token and the texts travel unencrypted"
    return f"warning: {host} is reachable by others, and there is no token: all of them may search"


def read_token(file: Path | None, environment: Mapping[str, str] = os.environ) -> str | None:
    """The bearer token of a file or of VERL_CREDIT_RETRIEVER_TOKEN; None when neither is given.

    Errors: ValueError when both are given, and for a token that is empty or not printable ASCII without blanks. The
    message never contains the token.
    """
    if file is not None and TOKEN_VARIABLE in environment:
        raise ValueError(f"--token-file={file} and {TOKEN_VARIABLE} are both given; keep one")
    if file is None and TOKEN_VARIABLE not in environment:
        return None
    source = TOKEN_VARIABLE if file is None else f"--token-file={file}"
    # An unreadable byte becomes a character that the check below refuses.
    token = (
        environment[TOKEN_VARIABLE] if file is None else file.read_text(encoding="ascii", errors="replace")
    ).strip()
    if not (token.isascii() and token.isprintable()) or not token or " " in token:
        raise ValueError(f"{source}: expected one line of printable ASCII without blanks")
    return token
