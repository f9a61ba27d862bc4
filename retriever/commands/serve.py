"""`verl-credit-retriever serve`, `deploy` and `undeploy`: their options are the fields of `Limits` and `ServeSettings`."""

import sys
from importlib.metadata import entry_points
from pathlib import Path
from typing import Literal

from typer import Option

from verl_credit_retriever.commands import DEVICE, THREADS
from verl_credit_retriever.http.limits import Limits
from verl_credit_retriever.serving.settings import TOKEN_VARIABLE, ServeSettings, check_host, read_token

ALLOW_REMOTE = Option(False, "--allow-remote", help="allow a host other than loopback")
# No --token: a command line is seen by every user of the machine.
TOKEN_FILE = Option(None, help=f"file with a bearer token; or set {TOKEN_VARIABLE}")
DEPLOYERS = "verl_credit_retriever.deploy"
"""The group of entry points (pyproject.toml) in which a module with `connect`, `deploy` and `undeploy` is registered."""
ADDRESS = Option("auto", help="of the Ray cluster; auto: RAY_ADDRESS, or the one that runs on this machine")


def _limit(name: str, text: str):
    return Option(getattr(Limits, name), parser=int, help=text)


TOPK = _limit("default_topk", "documents per query when a request names none")
MAX_TOPK = _limit("max_topk", "most documents per query")
MAX_REQUEST_QUERIES = _limit("max_request_queries", "most queries per request")
MAX_QUEUE_QUERIES = _limit(
    "max_queue_queries", "most queries that wait in a worker or front; more are answered with 429"
)
CACHE_ENTRIES = _limit("cache_entries", "most answers that a worker or front keeps in memory; 0: none")


def serve(
    index: Path = Option(),
    encoder: Path = Option(help="the encoder that built the index"),
    backend: Literal["faiss", "exact"] = "faiss",
    mmap: bool = Option(False, "--mmap", help="leave vectors in the file; implied by --workers"),
    verify: bool = Option(False, "--verify", help="hash all files, also those that have not changed"),
    gpu: bool = Option(False, "--gpu", help="search with faiss-gpu-cu12 on all visible GPUs"),
    nprobe: int | None = Option(
        None, parser=int, help="lists that are searched (ivf, ivfpq); default: the index's"
    ),
    refine: int | None = Option(
        None, parser=int, help="candidates per document (ivfpq); default: the index's"
    ),
    ef_search: int | None = Option(None, parser=int, help="candidates (hnsw); default: the index's"),
    host: str = "127.0.0.1",
    port: int = Option(8000, parser=int, help="0 picks a free port"),
    port_file: Path | None = Option(None, help="JSON {host, port, pid}, written when ready"),
    parent_pid: int | None = Option(None, parser=int, help="exit when this process ends"),
    allow_remote: bool = ALLOW_REMOTE,
    token_file: Path | None = TOKEN_FILE,
    workers: int = Option(1, parser=int, help="processes on the same port; limits are per process"),
    topk: int = TOPK,
    max_topk: int = MAX_TOPK,
    max_request_queries: int = MAX_REQUEST_QUERIES,
    max_query_chars: int = _limit("max_query_chars", "longest query in characters"),
    max_body_bytes: int = _limit("max_body_bytes", "largest request body"),
    max_queue_queries: int = MAX_QUEUE_QUERIES,
    max_batch_tokens: int = _limit("max_batch_tokens", "tokens of one encoder call, padding included"),
    cache_entries: int = CACHE_ENTRIES,
    cache_bytes: int = _limit("cache_bytes", "most memory for kept answers"),
    device: str = DEVICE,
    threads: int | None = THREADS,
):
    token = _token(token_file, host, allow_remote)
    limits = Limits(
        topk, max_topk, max_request_queries, max_query_chars, max_body_bytes, max_queue_queries,
        max_batch_tokens, cache_entries, cache_bytes,
    )  # fmt: skip
    settings = ServeSettings(
        index=index, encoder=encoder, host=host, port=port, port_file=port_file, parent_pid=parent_pid,
        threads=threads, device=device, backend=backend, verify="all" if verify else "known", workers=workers,
        # Several processes share one copy of the vectors, the file's; on a GPU each has its own.
        mmap=mmap or (workers > 1 and not gpu),
        gpu=gpu, nprobe=nprobe, refine=refine, ef_search=ef_search, limits=limits, token=token,
    )  # fmt: skip
    from verl_credit_retriever.serving.serve import run_server

    return run_server(settings)


def deploy(
    index: Path = Option(help="at the same path on every machine"),
    encoder: Path = Option(help="the encoder that built the index, at the same path on every machine"),
    shards: int = Option(1, parser=int, help="parts of the index, each with its own rows"),
    replicas: int = Option(1, parser=int, help="copies of every part and of the front"),
    address: str = ADDRESS,
    backend: Literal["faiss", "exact"] = "faiss",
    host: str = "127.0.0.1",
    port: int = Option(8000, parser=int, help="the same on every machine"),
    allow_remote: bool = ALLOW_REMOTE,
    token_file: Path | None = TOKEN_FILE,
    topk: int = TOPK,
    max_topk: int = MAX_TOPK,
    max_request_queries: int = MAX_REQUEST_QUERIES,
    max_queue_queries: int = MAX_QUEUE_QUERIES,
    cache_entries: int = CACHE_ENTRIES,
    device: str = DEVICE,
    threads: int = Option(1, parser=int, help="CPUs that each process takes of the cluster"),
    ready_seconds: float = Option(1800, parser=float, help="the longest that the start may take"),
):
    token = _token(token_file, host, allow_remote)
    if replicas < 1:
        raise ValueError(f"--replicas={replicas}; at least 1")
    if port == 0:
        raise ValueError("--port=0; every machine has the same one: name it")
    limits = Limits(
        topk, max_topk, max_request_queries, max_queue_queries=max_queue_queries, cache_entries=cache_entries
    )
    settings = ServeSettings(
        index=index.absolute(), encoder=encoder.absolute(), host=host, port=port, threads=threads, device=device,
        backend=backend, limits=limits, token=token,
    )  # fmt: skip
    from verl_credit_retriever.serving.serve import EXIT_PORT_IN_USE, CannotListen

    try:
        _cluster(address).deploy(settings, shards=shards, replicas=replicas, ready_seconds=ready_seconds)
    except CannotListen as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_PORT_IN_USE
    return 0


def undeploy(address: str = ADDRESS):
    _cluster(address).undeploy()


def _token(file: Path | None, host: str, allow_remote: bool) -> str | None:
    """The bearer token, and on stderr what follows from the host."""
    token = read_token(file)
    if warning := check_host(host, allow_remote=allow_remote, token=token is not None):
        print(warning, file=sys.stderr)
    return token


def _cluster(address: str):
    """What serves on a cluster: the package that brings Ray registers it, the retriever does not import it."""
    found = next(iter(entry_points(group=DEPLOYERS, name="ray")), None)
    if found is None:
        raise ValueError(f"deploy: no package registers 'ray' in {DEPLOYERS}; install verl-credit again")
    try:
        cluster = found.load()
    except ImportError as error:
        raise ValueError(
            f"deploy needs Ray Serve ({error}); pip install 'verl-credit[retriever-ray]'"
        ) from None
    cluster.connect(address)
    return cluster
