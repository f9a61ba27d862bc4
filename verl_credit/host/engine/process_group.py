"""How the ranks of a worker group meet: over gloo on a CPU, and by a store on loopback.

DIST_INIT_METHOD=loopback:// is for ranks on one machine. For env:// or tcp:// torch opens a store on all interfaces,
whatever the address, and without credentials. Here rank 0 binds the socket to loopback itself and passes it to the store.
The port is verl's MASTER_PORT. The import registers the handler.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from datetime import timedelta
from urllib.parse import parse_qsl, urlsplit

import torch.distributed
from torch.distributed import TCPStore, register_rendezvous_handler
from torch.distributed.constants import default_pg_timeout

ADDRESS = "127.0.0.1"


def meet(
    url: str, timeout: timedelta = default_pg_timeout, **_: object
) -> Iterator[tuple[TCPStore, int, int]]:
    """torch's rendezvous handler: yields (store, rank, world size).

    torch puts rank and world size into the url's query; the port is MASTER_PORT. Errors: ValueError without them, OSError
    when the port is in use.
    """
    given = dict(parse_qsl(urlsplit(url).query))
    try:
        rank, world_size, port = int(given["rank"]), int(given["world_size"]), int(os.environ["MASTER_PORT"])
    except KeyError as missing:
        needs = "rank and world_size, and MASTER_PORT in the environment"
        raise ValueError(f"{url} needs {needs}: {missing} is missing") from None
    listener = {}
    if rank == 0:
        listener["master_listen_fd"] = socket.create_server((ADDRESS, port)).detach()  # the store closes it
    yield TCPStore(ADDRESS, port, world_size, rank == 0, timeout, **listener), rank, world_size


register_rendezvous_handler("loopback", meet)


def init_gloo_group() -> None:
    """Join the default group over gloo, unless this process has joined one. The environment sets rank and group.

    verl requests the back ends "cpu:gloo,<device>:<backend>". On a CPU that names the device "cpu" twice, which torch
    refuses. verl keeps an existing default group, therefore ours is made first.
    """
    if torch.distributed.is_initialized():
        return
    torch.distributed.init_process_group(
        backend="cpu:gloo",
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
        init_method=os.environ.get("DIST_INIT_METHOD"),
    )
