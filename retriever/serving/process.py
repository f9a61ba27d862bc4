"""One serving process: load the index and the encoder, and serve until a signal."""

from __future__ import annotations

import asyncio
import signal
import socket
import time
from collections.abc import Callable

from verl_credit_retriever.index.manifest import IndexMismatch, fingerprint
from verl_credit_retriever.serving.parent import end_by_force_after, end_with
from verl_credit_retriever.serving.settings import ServeSettings
from verl_credit_retriever.serving.sockets import BACKLOG

REFUSE_SECONDS = 1.0  # new requests are answered with 503 for at least this long after SIGTERM
DRAIN_SECONDS = 25.0  # queued requests may take this long then
END_SECONDS = 29.0  # the process ends by force after this


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
    server = _make_server(_load_app(settings))
    asyncio.run(_serve(server, listener, on_ready))
    return 0


def _make_server(app):
    import uvicorn

    from verl_credit_retriever.serving.connections import ACCEPTED_AT_A_TIME, limited, most_connections

    class DrainingServer(uvicorn.Server):
        """From the first signal on the app refuses new requests; once those before are answered, the server ends.

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
        http=limited(most_connections()),
        backlog=ACCEPTED_AT_A_TIME,
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
        listener.listen(BACKLOG)  # asyncio has set it to what it accepts at a time
        on_ready()
    await serving


def _load_app(settings: ServeSettings):
    import torch
    import transformers

    from verl_credit_retriever.encoder.encoder import SentenceEncoder
    from verl_credit_retriever.http.server import create_app, probe
    from verl_credit_retriever.index.search import SearchIndex

    transformers.utils.logging.disable_progress_bar()
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    names = ("verify", "backend", "mmap", "gpu", "nprobe", "refine", "ef_search")
    index = SearchIndex.load(settings.index, **{name: getattr(settings, name) for name in names})
    index.warm()
    if settings.index_pin not in (None, fingerprint(index.manifest)):
        raise IndexMismatch(
            f"{settings.index}: the index has been replaced since this server started; restart it"
        )
    if settings.threads is not None and index.backend == "faiss":  # the exact backend runs without FAISS
        import faiss

        faiss.omp_set_num_threads(settings.threads)
    encoder = SentenceEncoder.for_index(settings.encoder, index.manifest, device=settings.device)
    app = create_app(index, encoder, limits=settings.limits, token=settings.token, hosts=settings.hosts)
    probe(index, encoder)
    return app
