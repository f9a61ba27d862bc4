"""One server process: bind, load, announce the port, serve until a signal or the parent's end."""

import asyncio
import json
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from .manifest import read_manifest

EXIT_PORT_IN_USE = 4
DRAIN_SECONDS = 10
LOOPBACK = ("127.0.0.1", "::1", "localhost")


def bind(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 picks a free one. Errors: OSError when the address cannot be had."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # The protocol is named because asyncio switches Nagle's algorithm off only where it is: every answer would
    # otherwise wait 40 ms for the acknowledgement of its headers.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        # Listening at once: two servers that both only bound the port would both believe they own it.
        listener.listen(2048)
    except OSError:
        listener.close()
        raise
    return listener


def write_port_file(path: Path, host: str, port: int) -> None:
    """Announce a ready server: {"host", "port", "pid"}, in one rename."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.write_text(json.dumps({"host": host, "port": port, "pid": os.getpid()}) + "\n")
    os.replace(temporary, path)


def watch_process(pid: int, on_gone: Callable[[], None], poll_seconds: float = 0.5) -> threading.Thread:
    """Call `on_gone` in a daemon thread once process `pid` has ended (at once if it has already)."""

    def wait() -> None:
        try:
            descriptor = os.pidfd_open(pid)  # Linux: readable when the process ends, even as a zombie
        except ProcessLookupError:
            return on_gone()
        except (AttributeError, OSError):
            while _alive(pid):
                time.sleep(poll_seconds)
            return on_gone()
        select.select([descriptor], [], [])
        os.close(descriptor)
        on_gone()

    thread = threading.Thread(target=wait, name="parent-watch", daemon=True)
    thread.start()
    return thread


def run_server(
    index: Path,
    encoder: Path,
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    port_file: Path | None = None,
    parent_pid: int | None = None,
    threads: int | None = None,
    device: str = "cpu",
    topk: int = 3,
) -> int:
    """Serve until SIGTERM, SIGINT or the end of `parent_pid`; returns the exit code (0, or 4: port in use).

    The port file appears when the socket listens and a canary query has worked, and goes when the server
    ends. Requests under way get 10 seconds to finish. Errors: those of loading index and encoder.
    """
    uvicorn_server = None

    def stop(*_) -> None:
        if uvicorn_server is None:
            raise SystemExit(0)  # still loading: nothing to drain
        uvicorn_server.should_exit = True

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    if parent_pid is not None:
        watch_process(parent_pid, _end_this_process)
    if port_file is not None:
        port_file.unlink(missing_ok=True)
    try:
        listener = bind(host, port)
    except OSError as error:
        print(f"error: cannot listen on {host}:{port}: {error.strerror or error}", file=sys.stderr)
        return EXIT_PORT_IN_USE
    with listener:
        app = _load_app(index, encoder, threads=threads, device=device, topk=topk)
        import uvicorn

        config = uvicorn.Config(
            app,
            log_level="warning",
            access_log=False,
            timeout_keep_alive=30,
            timeout_graceful_shutdown=DRAIN_SECONDS,
        )
        uvicorn_server = uvicorn.Server(config)
        try:
            asyncio.run(_serve(uvicorn_server, listener, host, port_file))
        finally:
            if port_file is not None:
                port_file.unlink(missing_ok=True)
    return 0


async def _serve(server, listener: socket.socket, host: str, port_file: Path | None) -> None:
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    while not server.started and not serving.done():
        await asyncio.sleep(0.01)
    if server.started:
        port = listener.getsockname()[1]
        if port_file is not None:
            write_port_file(port_file, host, port)
        print(f"serving on {_url(host, port)} (pid {os.getpid()})", flush=True)
    await serving


def _load_app(index: Path, encoder: Path, *, threads: int | None, device: str, topk: int):
    read_manifest(index)  # a wrong folder is reported at once, not after seconds of imports
    import faiss
    import torch
    import transformers

    from .encoder import SentenceEncoder
    from .index import SearchIndex
    from .server import CANARY, create_app, search_once

    transformers.utils.logging.disable_progress_bar()
    if threads is not None:
        torch.set_num_threads(threads)
        faiss.omp_set_num_threads(threads)
    loaded = SearchIndex.load(index)
    built_with = loaded.manifest["encoder"]
    settings = {key: built_with[key] for key in ("query_prefix", "passage_prefix", "max_length")}
    model = SentenceEncoder(encoder, device=device, **settings)
    app = create_app(loaded, model, default_topk=topk)
    search_once(loaded, model, [CANARY], 1)
    return app


def _end_this_process() -> None:
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(DRAIN_SECONDS + 5)
    os._exit(1)  # the main thread is stuck in foreign code; an orphan would be worse


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def _url(host: str, port: int) -> str:
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
