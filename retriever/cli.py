"""Dense retrieval over a JSONL corpus."""

import json
import sys
from dataclasses import fields
from importlib.metadata import entry_points
from pathlib import Path
from typing import Annotated

from typer import Option, Typer

from verl_credit_retriever.cli_index import index
from verl_credit_retriever.settings import (
    TOKEN_VARIABLE,
    Device,
    Limits,
    ServeSettings,
    Threads,
    check_host,
    number,
    read_token,
    takes,
)

AllowRemote = Annotated[bool, Option("--allow-remote", help="allow a host other than loopback")]
# There is no --token: every user of the machine sees a command line.
TokenFile = Annotated[Path | None, Option(help=f"file with a bearer token; or set {TOKEN_VARIABLE}")]
Address = Annotated[str, Option(help="of the Ray cluster; auto: RAY_ADDRESS, or the one of this machine")]
DEPLOYERS = "verl_credit_retriever.deploy"
"""The entry-point group; its module provides `connect`, `deploy` and `undeploy`."""
DEPLOYED = ("backend", "host", "device", "encode_with", "default_topk", "max_topk", "max_request_queries")
DEPLOYED += ("max_queue_queries", "cache_entries")
SERVERS = "several serve --mmap, each with a --port, and their addresses in the run's search.url (docs/retriever.md)"

app = Typer(
    help=__doc__,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    result_callback=sys.exit,
)
app.command(help="encode a corpus and write an index")(index)


@app.command(help="answer POST /retrieve as Search-R1's server does")
@takes(ServeSettings, Limits)
def serve(
    verify: Annotated[bool, Option("--verify", help="hash all files, also unchanged ones")] = False,
    allow_remote: AllowRemote = False,
    token_file: TokenFile = None,
    **values,
):
    settings = _settings(values, token_file, allow_remote, verify="all" if verify else "known")
    from verl_credit_retriever.start import run_server

    return run_server(settings)


@app.command(help="answer the same on a running Ray cluster: the index in shards, each with replicas")
@takes(ServeSettings, Limits, only=DEPLOYED)
def deploy(
    index: Annotated[Path, Option(help="at the same path on every machine")],
    encoder: Annotated[Path, Option(help="the index's encoder, at the same path on every machine")],
    shards: Annotated[int, number("parts of the index, each with its own rows")] = 1,
    replicas: Annotated[int, number("copies of every part and of the front")] = 1,
    address: Address = "auto",
    port: Annotated[int, number("the same on every machine")] = ServeSettings.port,
    allow_remote: AllowRemote = False,
    token_file: TokenFile = None,
    threads: Annotated[int, number("CPUs that each process takes of the cluster")] = 1,
    ready_seconds: Annotated[float, number("the longest that the start may take", parser=float)] = 1800,
    **values,
):
    values |= {"index": index.absolute(), "encoder": encoder.absolute(), "port": port, "threads": threads}
    settings = _settings(values, token_file, allow_remote)
    if replicas < 1:
        raise ValueError(f"--replicas={replicas}; at least 1")
    if port == 0:
        raise ValueError("--port=0; every machine has the same one: name it")
    from verl_credit_retriever.serve import EXIT_PORT_IN_USE, CannotListen

    try:
        _cluster(address).deploy(settings, shards=shards, replicas=replicas, ready_seconds=ready_seconds)
    except CannotListen as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_PORT_IN_USE
    return 0


@app.command(help="take the deployment away again")
def undeploy(address: Address = "auto"):
    _cluster(address).undeploy()
    return 0


def _settings(values: dict, token_file: Path | None, allow_remote: bool, **more) -> ServeSettings:
    """The settings that the options give; on stderr what follows from the host."""
    token = read_token(token_file)
    if warning := check_host(values["host"], allow_remote=allow_remote, token=token is not None):
        print(warning, file=sys.stderr)
    limits = {field.name: values.pop(field.name) for field in fields(Limits) if field.name in values}
    return ServeSettings(**values, **more, limits=Limits(**limits), token=token)


def _cluster(address: str):
    """The module that serves on a cluster; the package that brings Ray registers it, the retriever does not import it."""
    entry = next(iter(entry_points(group=DEPLOYERS, name="ray")), None)
    if entry is None:
        raise ValueError(f"deploy: no package registers 'ray' in {DEPLOYERS}; install verl-credit again")
    try:
        cluster = entry.load()
    except ImportError as error:
        raise ValueError(f"deploy needs Ray ({error}); pip install 'verl-credit[retriever-ray]'") from None
    cluster.connect(address)
    return cluster


@app.command(help="compare what is served with exact search")
@takes(ServeSettings, only=("nprobe", "refine", "ef_search"))
def check(
    url: Annotated[str, Option(help="base URL of a server; several with commas")],
    index: Annotated[Path, Option(help="the index folder that should be served")],
    encoder: Annotated[Path, Option(help="the encoder that built the index")],
    queries: Annotated[Path, Option(help='.txt (one a line) or .jsonl ("query" or "question")')],
    k: Annotated[str, Option(help="recall at these numbers of documents")] = "3,10",
    min_recall: Annotated[float | None, number("default: 0.99 (flat, exact) or 0.95", parser=float)] = None,
    token_file: TokenFile = None,
    as_json: Annotated[bool, Option("--json", help="print the report as JSON")] = False,
    device: Device = "cpu",
    threads: Threads = None,
    **search: int | None,
):
    """Exit codes: 0 all is well, 1 the servers have a problem (each is a line on stderr), 2 a wrong argument."""
    try:
        ks = [int(part) for part in k.split(",")]
    except ValueError:
        raise ValueError(f"--k={k!r}; expected integers with commas, such as 3,10") from None
    urls = list(dict.fromkeys(part.strip().rstrip("/").removesuffix("/retrieve") for part in url.split(",")))
    for one in urls:
        if "@" in one:
            raise ValueError("--url: holds a user or password; give a token with --token-file instead")
        if not one.startswith(("http://", "https://")):
            raise ValueError(f"--url={one!r}; expected http://HOST:PORT")
    token = read_token(token_file)
    if min_recall is not None and not 0 <= min_recall <= 1:
        raise ValueError(f"--min-recall={min_recall}; expected 0 to 1")

    import torch
    import transformers

    from verl_credit_retriever.check import check_servers, read_queries
    from verl_credit_retriever.encoder import SentenceEncoder
    from verl_credit_retriever.index.search import SearchIndex

    texts = read_queries(queries)
    transformers.utils.logging.disable_progress_bar()
    if threads is not None:
        torch.set_num_threads(threads)
    exact = SearchIndex.load(index, backend="exact", mmap=True, **search)
    model = SentenceEncoder.for_index(encoder, exact.manifest, device=device)
    report = check_servers(urls, exact, model, texts, ks=ks, min_recall=min_recall, token=token)
    print(json.dumps(report, indent=2) if as_json else _table(report))
    for problem in report["problems"]:
        print(f"problem: {problem}", file=sys.stderr)
    return 1 if report["problems"] else 0


def _table(report: dict) -> str:
    lines = [f"index        {report['kind']}, {report['rows']} rows; {report['queries']} queries"]
    for url, server in report["servers"].items():
        recall = "  ".join(f"recall@{k} {value:.4f}" for k, value in server["recall"].items())
        same = "as the folder" if server["fingerprint"] == report["fingerprint"] else "NOT the folder's"
        lines += [f"{url}", f"  {recall}  (against exact search)"]
        lines.append(f"  fingerprint {same}")
    lines.append(f"fingerprint  search.index_fingerprint={report['fingerprint']}")
    lines.append("PROBLEMS" if report["problems"] else "ok")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    """Exit codes: 0 done, 1 `check` reports a problem, 2 a wrong argument or input (one line says which), 4 the port
    is in use.
    """
    line = sys.argv[1:] if arguments is None else arguments
    if line[:1] == ["serve"] and any(one.partition("=")[0] == "--workers" for one in line):
        print(f"serve --workers is gone (commit 33b16abd last had it); now: {SERVERS}", file=sys.stderr)
        return 2
    try:
        app(arguments, prog_name="verl-credit-retriever")
    except SystemExit as end:
        return end.code
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
