"""`verl-credit-retriever serve`: its options are the fields of `Limits` and of `ServeSettings`."""

import sys
from pathlib import Path
from typing import Literal

from typer import Option

from verl_credit_retriever.commands import DEVICE, THREADS
from verl_credit_retriever.http.limits import Limits
from verl_credit_retriever.serving.settings import TOKEN_VARIABLE, ServeSettings, check_host, read_token


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
    allow_remote: bool = Option(False, "--allow-remote", help="allow a host other than loopback"),
    # No --token: a command line is seen by every user of the machine.
    token_file: Path | None = Option(None, help=f"file with a bearer token; or set {TOKEN_VARIABLE}"),
    workers: int = Option(1, parser=int, help="processes on the same port; limits are per process"),
    topk: int = Option(3, parser=int, help="documents per query when a request names none"),
    max_topk: int = Option(Limits.max_topk, parser=int, help="most documents per query"),
    max_request_queries: int = Option(
        Limits.max_request_queries, parser=int, help="most queries per request"
    ),
    max_query_chars: int = Option(Limits.max_query_chars, parser=int, help="longest query in characters"),
    max_body_bytes: int = Option(Limits.max_body_bytes, parser=int, help="largest request body"),
    max_queue_queries: int = Option(
        Limits.max_queue_queries, parser=int, help="most queries that wait; more are answered with 429"
    ),
    max_batch_tokens: int = Option(
        Limits.max_batch_tokens, parser=int, help="tokens of one encoder call, padding included"
    ),
    cache_entries: int = Option(
        Limits.cache_entries, parser=int, help="most answers kept in memory; 0: none"
    ),
    cache_bytes: int = Option(Limits.cache_bytes, parser=int, help="most memory for kept answers"),
    device: str = DEVICE,
    threads: int | None = THREADS,
):
    token = read_token(token_file)
    warning = check_host(host, allow_remote=allow_remote, token=token is not None)
    if warning:
        print(warning, file=sys.stderr)
    settings = ServeSettings(
        index=index,
        encoder=encoder,
        host=host,
        port=port,
        port_file=port_file,
        parent_pid=parent_pid,
        threads=threads,
        device=device,
        backend=backend,
        verify="all" if verify else "known",
        workers=workers,
        # Several processes share one copy of the vectors, the file's; on a GPU each has its own.
        mmap=mmap or (workers > 1 and not gpu),
        gpu=gpu,
        nprobe=nprobe,
        refine=refine,
        ef_search=ef_search,
        limits=Limits(
            topk,
            max_topk,
            max_request_queries,
            max_query_chars,
            max_body_bytes,
            max_queue_queries,
            max_batch_tokens,
            cache_entries,
            cache_bytes,
        ),
        token=token,
    )
    from verl_credit_retriever.serving.serve import run_server

    return run_server(settings)
