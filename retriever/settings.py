"""Settings of the commands. Each option is declared once: in the annotation of a dataclass field or of a parameter."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Annotated, Literal, get_origin

from typer import Option

POOLINGS = ("mean", "cls")
LOOPBACK = ("127.0.0.1", "::1", "localhost")
TOKEN_VARIABLE = "VERL_CREDIT_RETRIEVER_TOKEN"


def number(text: str, *names: str, parser: Callable = int):
    """An option that takes an integer, or what `parser` reads; `names` replace the one of the field."""
    return Option(*names, parser=parser, help=text)


def takes(*declared: type, only: tuple[str, ...] = ()) -> Callable:
    """Give a command the annotated fields of these dataclasses as options; it gets their values as `**values`.

    A parameter that the command declares itself replaces the field of its name. `only` chooses among the fields.
    """

    def add(command: Callable) -> Callable:
        own = [p for p in signature(command).parameters.values() if p.kind is not Parameter.VAR_KEYWORD]
        names = {parameter.name for parameter in own}
        every = [field for settings in declared for field in signature(settings).parameters.values()]
        fields = [
            field.replace(kind=Parameter.KEYWORD_ONLY)
            for field in every
            if get_origin(field.annotation) is Annotated and field.name not in names
            if not only or field.name in only
        ]
        command.__signature__ = Signature([*own, *fields])
        command.__annotations__ = {p.name: p.annotation for p in (*own, *fields)}
        return command

    return add


def _threads(text: str) -> int:
    if int(text) < 1:
        raise ValueError(f"{text}; at least 1")
    # This is set before NumPy is imported: its matrix products, the exact backend, read it then and never again.
    os.environ["OMP_NUM_THREADS"] = text
    return int(text)


Threads = Annotated[int | None, number("CPU threads; default: what torch takes", parser=_threads)]
Device = Annotated[str, Option(help="torch device of the encoder")]


@dataclass(frozen=True)
class Limits:
    """The bounds of one server process, which are options of `serve`; `GET /info` shows them.

    A request above a bound is a 422; max_body_bytes: 413; max_queue_queries: 429 with Retry-After.
    Errors: ValueError names the field.
    """

    default_topk: Annotated[int, number("documents per query when a request names none", "--topk")] = 3
    max_topk: Annotated[int, number("most documents per query")] = 100
    max_request_queries: Annotated[int, number("queries of a request that are worked on together")] = 4096
    max_request_documents: Annotated[int, number("most queries times documents per query")] = 409_600
    """They are in memory when the answer is written."""
    max_query_chars: Annotated[int, number("longest query in characters; a longer one is cut")] = 10_000
    """The encoder cuts at its own number of tokens, which are far fewer characters."""
    max_body_bytes: Annotated[int, number("largest request body")] = 8 << 20
    max_queue_queries: Annotated[int, number("most queries that wait in a server or front; more: 429")] = 8192
    max_batch_tokens: Annotated[int, number("tokens of a batch for the encoder, padding included")] = 4096
    """The longest text times the number of texts; a single text always fits."""
    cache_entries: Annotated[int, number("most answers that a server or front keeps; 0: none")] = 65_536
    cache_bytes: Annotated[int, number("most memory for kept answers")] = 256 << 20
    """The memory is estimated from the texts."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            least = int(name != "cache_entries")
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"{name}={value!r}; expected an integer of at least {least}")
        # Even an idle server would refuse a request of more queries than its queue holds.
        most_of = {"default_topk": "max_topk", "max_topk": "max_request_documents"}
        for name, most in {**most_of, "max_request_queries": "max_queue_queries"}.items():
            if getattr(self, name) > getattr(self, most):
                raise ValueError(f"{name}={getattr(self, name)}; at most {most}={getattr(self, most)}")

    def refusal(self, queries: int, k: int) -> str | None:
        """Returns the limit that an answer of this size exceeds, as "field: value; what is accepted", or None."""
        if k > self.max_topk:
            return f"topk: {k}; at most {self.max_topk}"
        if queries * k > self.max_request_documents:
            most = self.max_request_documents // k
            return f"queries: {queries} of them; at most {most} with {k} documents each"
        return None

    def mended(self, queries: list[str]) -> tuple[list[str], dict[str, int]]:
        """(the queries cut to their longest and with "?" for lone surrogates, how many were mended by reason)"""
        cut = [query[: self.max_query_chars] for query in queries]
        whole = [query.encode("utf-8", "replace").decode() for query in cut]  # JSON allows a lone surrogate
        long = sum(len(query) > self.max_query_chars for query in queries)
        odd = sum(one != other for one, other in zip(cut, whole, strict=True))
        return whole, {"cut": long, "not_text": odd}


@dataclass(frozen=True)
class ServeSettings:
    """The command line of `serve`; the token is never printed. Errors: ValueError names the option."""

    index: Annotated[Path, Option()]
    encoder: Annotated[Path, Option(help="the encoder that built the index")]
    backend: Annotated[Literal["faiss", "exact"], Option()] = "faiss"
    mmap: Annotated[
        bool, Option("--mmap", help="leave vectors in the file, whose pages several servers share")
    ] = False
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
    device: Device = "cpu"
    encode_with: Annotated[Literal["torch", "openvino"], Option(help="computes the encoder on a CPU")] = (
        "torch"
    )
    threads: Threads = None
    limits: Limits = field(default_factory=Limits)
    token: str | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if self.threads is not None and self.threads < 1:
            raise ValueError(f"--threads={self.threads}; at least 1")
        if not 0 <= self.port <= 65535:
            raise ValueError(f"--port={self.port}; expected 0 to 65535")

    @property
    def hosts(self) -> tuple[str, ...] | None:
        """The names that a Host header may have; None: any. Without a token a web page that a browser on this machine
        shows must not reach the server."""
        return LOOPBACK if self.token is None and self.host in LOOPBACK else None


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
    token, source = environment.get(TOKEN_VARIABLE), TOKEN_VARIABLE
    if file is not None:
        if token is not None:
            raise ValueError(f"--token-file={file} and {TOKEN_VARIABLE} are both given; keep one")
        # An unreadable byte becomes a character that the check below refuses.
        token, source = file.read_text(encoding="ascii", errors="replace"), f"--token-file={file}"
    if token is None:
        return None
    token = token.strip()
    if not (token.isascii() and token.isprintable()) or not token or " " in token:
        raise ValueError(f"{source}: expected one line of printable ASCII without blanks")
    return token
