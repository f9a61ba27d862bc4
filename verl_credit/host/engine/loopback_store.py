"""torch's store on loopback: DIST_INIT_METHOD=loopback:// for the default group of ranks on one machine.

For env:// or tcp:// torch opens a store on all interfaces, whatever the address, and without credentials. Here rank 0 binds
the socket to loopback itself and passes it to the store. The port is verl's MASTER_PORT.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from datetime import timedelta
from urllib.parse import parse_qsl, urlsplit

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
        rank, world_size = int(given["rank"]), int(given["world_size"])
        port = int(os.environ["MASTER_PORT"])
    except KeyError as missing:
        raise ValueError(
            f"{url} needs rank and world_size, and MASTER_PORT in the environment: {missing} is missing"
        ) from None
    listener = {}
    if rank == 0:
        listener["master_listen_fd"] = socket.create_server((ADDRESS, port)).detach()  # the store closes it
    yield TCPStore(ADDRESS, port, world_size, rank == 0, timeout, **listener), rank, world_size


register_rendezvous_handler("loopback", meet)
