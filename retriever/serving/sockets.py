"""The address of a server: the check of its host, the listening socket, and the file that announces the port."""

import json
import os
import socket
from pathlib import Path

BACKLOG = 2048
LOOPBACK = ("127.0.0.1", "::1", "localhost")


def check_host(host: str, *, allow_remote: bool, token: bool) -> str | None:
    """A warning for a host that other machines can reach, None for loopback. Errors: ValueError if not allowed."""
    if host in LOOPBACK:
        return None
    if not allow_remote:
        raise ValueError(f"--host={host}: not loopback; add --allow-remote to serve other machines")
    if token:
        return f"warning: {host} is reachable by others; the token and the texts travel unencrypted"
    return f"warning: {host} is reachable by others, and there is no token: all of them may search"


def bind(host: str, port: int, *, shared: bool = False) -> socket.socket:
    """A listening socket; port 0 picks a free one. Errors: OSError when the address is not available.

    `shared`: one of several on a port, among which the kernel divides connections. It does not listen yet.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio switches Nagle's algorithm off only when the protocol is named; otherwise every answer waits 40 ms for
    # the acknowledgement of its headers.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shared:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.bind((host, port))
        if not shared:
            # Listen at once: two servers can both bind a port, but not both listen on it.
            listener.listen(BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener


def url_of(host: str, port: int) -> str:
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def announce(listener: socket.socket, host: str, port_file: Path | None) -> None:
    """Print the address, and write {"host", "port", "pid"} to `port_file` in one rename."""
    port = listener.getsockname()[1]
    if port_file is not None:
        temporary = port_file.with_name(f".{port_file.name}.{os.getpid()}.tmp")
        temporary.write_text(json.dumps({"host": host, "port": port, "pid": os.getpid()}) + "\n")
        os.replace(temporary, port_file)
    print(f"serving on {url_of(host, port)} (pid {os.getpid()})", flush=True)
