"""The command `verl-credit-retriever serve`: its options, which are the fields of `Limits` and of the process."""

import argparse
import sys
from dataclasses import fields
from pathlib import Path

from verl_credit_retriever.http.limits import Limits
from verl_credit_retriever.serving.settings import TOKEN_VARIABLE, ServeSettings, read_token
from verl_credit_retriever.serving.sockets import check_host

LIMIT_HELP = {
    "max_topk": "most documents per query",
    "max_request_queries": "most queries per request",
    "max_query_chars": "longest query in characters",
    "max_body_bytes": "largest request body",
    "max_queue_queries": "most queries that wait; more are answered with 429",
    "max_batch_tokens": "tokens of one encoder call, padding included",
    "cache_entries": "most answers kept in memory; 0: none",
    "cache_bytes": "most memory for kept answers",
}


def add_serve(commands, defaults: type) -> argparse.ArgumentParser:
    """Register `serve` among the commands; returns its parser, to which device options may be added."""
    serve = commands.add_parser(
        "serve",
        help="answer POST /retrieve and POST /v1/search",
        formatter_class=defaults,
    )
    serve.set_defaults(run=_serve)
    serve.add_argument("--index", type=Path, required=True)
    serve.add_argument("--encoder", type=Path, required=True, help="the encoder that built the index")
    serve.add_argument("--backend", default="faiss", choices=["faiss", "exact"])
    serve.add_argument("--mmap", action="store_true", help="leave vectors in the file; implied by --workers")
    serve.add_argument("--gpu", action="store_true", help="search with faiss-gpu-cu12")
    serve.add_argument("--nprobe", type=int, help="lists that are searched (ivf); default: the index's")
    serve.add_argument("--ef-search", type=int, help="candidates (hnsw); default: the index's")
    serve.add_argument("--host", default="127.0.0.1")
    serve.add_argument("--port", type=int, default=8000, help="0 picks a free port")
    serve.add_argument("--port-file", type=Path, help="JSON {host, port, pid}, written when ready")
    serve.add_argument("--parent-pid", type=int, help="exit when this process ends")
    serve.add_argument("--allow-remote", action="store_true", help="allow a host other than loopback")
    # No --token: a command line is seen by every user of the machine.
    serve.add_argument("--token-file", type=Path, help=f"file with a bearer token; or set {TOKEN_VARIABLE}")
    serve.add_argument(
        "--workers", type=int, default=1, help="processes on the same port; limits are per process"
    )
    serve.add_argument("--topk", type=int, default=3, help="documents per query when a request names none")
    for field in fields(Limits):
        if field.name in LIMIT_HELP:
            option = "--" + field.name.replace("_", "-")
            serve.add_argument(option, type=int, default=field.default, help=LIMIT_HELP[field.name])
    return serve


def _serve(options: argparse.Namespace) -> int:
    token = read_token(options.token_file)
    warning = check_host(options.host, allow_remote=options.allow_remote, token=token is not None)
    if warning:
        print(warning, file=sys.stderr)
    limits = {name: getattr(options, name) for name in LIMIT_HELP}
    settings = ServeSettings(
        index=options.index,
        encoder=options.encoder,
        host=options.host,
        port=options.port,
        port_file=options.port_file,
        parent_pid=options.parent_pid,
        threads=options.threads,
        device=options.device,
        backend=options.backend,
        workers=options.workers,
        # Several processes share one copy of the vectors, the file's; on a GPU each has its own.
        mmap=options.mmap or (options.workers > 1 and not options.gpu),
        gpu=options.gpu,
        nprobe=options.nprobe,
        ef_search=options.ef_search,
        limits=Limits(default_topk=options.topk, **limits),
        token=token,
    )
    from verl_credit_retriever.serving.serve import run_server

    return run_server(settings)
