"""A server's process binds, loads, announces its port, and serves until a signal or the parent's end."""

import asyncio
import json
import os
import resource
import select
import signal
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil

from verl_credit_retriever.index.manifest import write_whole
from verl_credit_retriever.settings import ServeSettings

EXIT_PORT_IN_USE = 4
BACKLOG = 2048
PARENT_SECONDS = 0.5  # between two checks of the parent where no descriptor reports its end
REFUSE_SECONDS = 1.0  # new requests are answered with 503 for at least this long after SIGTERM
DRAIN_SECONDS = 25.0  # queued requests may take this long then
END_SECONDS = 29.0  # the process ends by force after this


class CannotListen(OSError):
    """The port is in use, or the host is not this machine's."""


def serve_in_this_process(
    settings: ServeSettings, listener: socket.socket, on_ready: Callable[[], None]
) -> int:
    """Load and serve on `listener`; calls `on_ready` once requests are answered. Returns 0 after a drain."""
    server = None

    def end(number: int, frame) -> None:
        if server is None:
            raise SystemExit(0)  # still loading: nothing to drain
        server.handle_exit(number, frame)

    signal.signal(signal.SIGTERM, end)
    signal.signal(signal.SIGINT, end)
    if settings.parent_pid is not None:
        end_with(settings.parent_pid, force_after=END_SECONDS)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):  # every connection is an open file, and the usual soft limit is 1024
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    server = _make_server(_load_app(settings))
    asyncio.run(_serve(server, listener, on_ready))
    return 0


def _make_server(app):
    import uvicorn

    class DrainingServer(uvicorn.Server):
        """The app refuses new requests from the first signal on; once the earlier requests are answered, the server ends.

        It does not wait for requests that came later: clients that try again at once would keep it.
        """

        _refuse_until = 0.0

        def handle_exit(self, sig: int, frame) -> None:
            if app.state.draining:
                return super().handle_exit(sig, frame)
            app.state.draining = True
            self._refuse_until = time.monotonic() + REFUSE_SECONDS
            self._accepted = set(self.server_state.tasks)
            end_by_force_after(END_SECONDS)

        async def on_tick(self, counter: int) -> bool:
            now = time.monotonic()
            if app.state.draining and (now > self._refuse_until + DRAIN_SECONDS or self._idle(now)):
                self.should_exit = True
            return await super().on_tick(counter)

        def _idle(self, now: float) -> bool:
            return now > self._refuse_until and all(task.done() for task in self._accepted)

    config = uvicorn.Config(
        app,
        backlog=BACKLOG,
        log_level="warning",
        access_log=False,
        timeout_keep_alive=30,
        timeout_graceful_shutdown=1,
    )
    return DrainingServer(config)


async def _serve(server, listener: socket.socket, on_ready: Callable[[], None]) -> None:
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    while not server.started and not serving.done():
        await asyncio.sleep(0.01)
    if server.started:
        on_ready()
    await serving


def _load_app(settings: ServeSettings):
    import torch
    import transformers

    from verl_credit_retriever import engines
    from verl_credit_retriever.encoder import SentenceEncoder
    from verl_credit_retriever.http.server import CANARY, create_app
    from verl_credit_retriever.index.search import SearchIndex

    transformers.utils.logging.disable_progress_bar()
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    names = ("verify", "backend", "mmap", "gpu", "nprobe", "refine", "ef_search")
    index = SearchIndex.load(settings.index, **{name: getattr(settings, name) for name in names})
    if settings.threads is not None and index.backend == "faiss":  # the exact backend runs without FAISS
        import faiss

        faiss.omp_set_num_threads(settings.threads)
    encoder = SentenceEncoder.for_index(settings.encoder, index.manifest, device=settings.device)
    print(engines.use(encoder, settings.encode_with), flush=True)
    app = create_app(index, encoder, limits=settings.limits, token=settings.token, hosts=settings.hosts)
    index.search(encoder.encode_queries([CANARY]), 1)
    return app


def end_with(pid: int, *, force_after: float) -> None:
    """This process gets SIGTERM once `pid` has ended, and ends by force that many seconds later."""

    def watch() -> None:
        try:
            descriptor = os.pidfd_open(pid)  # Linux: readable when the process ends, even as a zombie
        except ProcessLookupError:
            pass
        except (AttributeError, OSError):
            while psutil.pid_exists(pid):
                time.sleep(PARENT_SECONDS)
        else:
            select.select([descriptor], [], [])
            os.close(descriptor)
        end_by_force_after(force_after)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


def end_by_force_after(seconds: float) -> None:
    """End this process with code 1 after that time, even when its main thread is stuck in foreign code."""

    timer = threading.Timer(seconds, os._exit, (1,))
    timer.daemon = True
    timer.start()


def bind(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 picks a free one. Errors: OSError when the address is not available."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio switches Nagle's algorithm off only when the protocol is named; otherwise every answer waits 40 ms for
    # the acknowledgement of its headers.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
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
        address = {"host": host, "port": port, "pid": os.getpid()}
        write_whole(port_file, f"{json.dumps(address)}\n".encode())
    print(f"serving on {url_of(host, port)} (pid {os.getpid()})", flush=True)
