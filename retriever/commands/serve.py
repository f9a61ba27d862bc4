"""`verl-credit-retriever serve`, `deploy` and `undeploy`; most options are fields of `Limits` and `ServeSettings`."""

import sys
from dataclasses import fields
from importlib.metadata import entry_points
from pathlib import Path
from typing import Annotated

from typer import Option

from verl_credit_retriever.http.limits import Limits
from verl_credit_retriever.options import number, takes
from verl_credit_retriever.serving.settings import TOKEN_VARIABLE, ServeSettings, check_host, read_token

AllowRemote = Annotated[bool, Option("--allow-remote", help="allow a host other than loopback")]
# There is no --token: every user of the machine sees a command line.
TokenFile = Annotated[Path | None, Option(help=f"file with a bearer token; or set {TOKEN_VARIABLE}")]
Address = Annotated[
    str, Option(help="of the Ray cluster; auto: RAY_ADDRESS, or the one that runs on this machine")
]
DEPLOYERS = "verl_credit_retriever.deploy"
"""The group of entry points (pyproject.toml) in which a module with `connect`, `deploy` and `undeploy` is registered."""
DEPLOYED = ("backend", "host", "device", "default_topk", "max_topk", "max_request_queries")
DEPLOYED += ("max_queue_queries", "cache_entries")


@takes(ServeSettings, Limits)
def serve(
    verify: Annotated[
        bool, Option("--verify", help="hash all files, also those that have not changed")
    ] = False,
    allow_remote: AllowRemote = False,
    token_file: TokenFile = None,
    **values,
):
    # Several processes share one copy of the vectors, the file's; on a GPU each has its own.
    values["mmap"] |= values["workers"] > 1 and not values["gpu"]
    settings = _settings(values, token_file, allow_remote, verify="all" if verify else "known")
    from verl_credit_retriever.serving.serve import run_server

    return run_server(settings)


@takes(ServeSettings, Limits, only=DEPLOYED)
def deploy(
    index: Annotated[Path, Option(help="at the same path on every machine")],
    encoder: Annotated[
        Path, Option(help="the encoder that built the index, at the same path on every machine")
    ],
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
    from verl_credit_retriever.serving.serve import EXIT_PORT_IN_USE, CannotListen

    try:
        _cluster(address).deploy(settings, shards=shards, replicas=replicas, ready_seconds=ready_seconds)
    except CannotListen as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_PORT_IN_USE
    return 0


def undeploy(address: Address = "auto"):
    _cluster(address).undeploy()


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
        raise ValueError(
            f"deploy needs Ray Serve ({error}); pip install 'verl-credit[retriever-ray]'"
        ) from None
    cluster.connect(address)
    return cluster
