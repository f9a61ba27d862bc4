"""`verl-credit-retriever deploy` and `undeploy`: the server in shards and replicas on a Ray cluster."""

import sys
from pathlib import Path
from typing import Literal

from typer import Option

from verl_credit_retriever.commands import DEVICE
from verl_credit_retriever.http.limits import Limits
from verl_credit_retriever.serving.settings import TOKEN_VARIABLE, ServeSettings, check_host, read_token

ADDRESS = Option("auto", help="of the Ray cluster; auto: RAY_ADDRESS, or the one that runs on this machine")


def deploy(
    index: Path = Option(help="at the same path on every machine"),
    encoder: Path = Option(help="the encoder that built the index, at the same path on every machine"),
    shards: int = Option(1, parser=int, help="parts of the index, each with its own rows"),
    replicas: int = Option(1, parser=int, help="copies of every part and of the front"),
    address: str = ADDRESS,
    backend: Literal["faiss", "exact"] = "faiss",
    host: str = "127.0.0.1",
    port: int = Option(8000, parser=int, help="the same on every machine"),
    allow_remote: bool = Option(False, "--allow-remote", help="allow a host other than loopback"),
    token_file: Path | None = Option(None, help=f"file with a bearer token; or set {TOKEN_VARIABLE}"),
    topk: int = Option(Limits.default_topk, parser=int, help="documents per query when a request names none"),
    max_topk: int = Option(Limits.max_topk, parser=int, help="most documents per query"),
    max_request_queries: int = Option(
        Limits.max_request_queries, parser=int, help="most queries per request"
    ),
    max_queue_queries: int = Option(
        Limits.max_queue_queries,
        parser=int,
        help="most queries that wait in a front; more are answered with 429",
    ),
    cache_entries: int = Option(
        Limits.cache_entries, parser=int, help="most answers that a front keeps in memory; 0: none"
    ),
    device: str = DEVICE,
    threads: int = Option(1, parser=int, help="CPUs that each process takes of the cluster"),
    ready_seconds: float = Option(1800, parser=float, help="the longest that the start may take"),
):
    token = read_token(token_file)
    warning = check_host(host, allow_remote=allow_remote, token=token is not None)
    if warning:
        print(warning, file=sys.stderr)
    if replicas < 1:
        raise ValueError(f"--replicas={replicas}; at least 1")
    if port == 0:
        raise ValueError("--port=0; every machine has the same one: name it")
    limits = Limits(
        default_topk=topk,
        max_topk=max_topk,
        max_request_queries=max_request_queries,
        max_queue_queries=max_queue_queries,
        cache_entries=cache_entries,
    )
    settings = ServeSettings(
        index=index.absolute(), encoder=encoder.absolute(), host=host, port=port, threads=threads, device=device,
        backend=backend, limits=limits, token=token,
    )  # fmt: skip
    cluster = _cluster(address)
    cluster.deploy(settings, shards=shards, replicas=replicas, ready_seconds=ready_seconds)


def undeploy(address: str = ADDRESS):
    _cluster(address).undeploy()


def _cluster(address: str):
    try:
        from verl_credit_retriever.deploy import cluster
    except ImportError as error:
        raise ValueError(
            f"deploy needs Ray Serve ({error}); pip install verl-credit[retriever-ray]"
        ) from None
    cluster.connect(address)
    return cluster
