"""The settings of one `serve`, which it also sends to its worker processes."""

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Literal, Self

from typer import Option

from verl_credit_retriever.http.limits import Limits
from verl_credit_retriever.options import Device, Threads, number

LOOPBACK = ("127.0.0.1", "::1", "localhost")
TOKEN_VARIABLE = "VERL_CREDIT_RETRIEVER_TOKEN"


@dataclass(frozen=True)
class ServeSettings:
    """The command line of `serve`; the token is never printed. Errors: ValueError names the option."""

    index: Annotated[Path, Option()]
    encoder: Annotated[Path, Option(help="the encoder that built the index")]
    backend: Annotated[Literal["faiss", "exact"], Option()] = "faiss"
    mmap: Annotated[bool, Option("--mmap", help="leave vectors in the file; implied by --workers")] = False
    verify: str = "known"
    """The files that are hashed: all, known (the files that changed since this user last hashed them), none."""
    gpu: Annotated[bool, Option("--gpu", help="search with faiss-gpu-cu12 on all visible GPUs")] = False
    nprobe: Annotated[int | None, number("lists that are searched (ivf, ivfpq); default: the index's")] = None
    refine: Annotated[int | None, number("candidates per document (ivfpq); default: the index's")] = None
    ef_search: Annotated[int | None, number("candidates (hnsw); default: the index's")] = None
    host: Annotated[str, Option()] = "127.0.0.1"
    port: Annotated[int, number("0 picks a free port")] = 8000
    port_file: Annotated[Path | None, Option(help="JSON {host, port, pid}, written when ready")] = None
    parent_pid: Annotated[int | None, number("exit when this process ends")] = None
    workers: Annotated[int, number("processes on the same port; limits are per process")] = 1
    device: Device = "cpu"
    threads: Threads = None
    index_pin: str | None = None
    """`manifest.fingerprint` of the one manifest that may be served; None: any."""
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
