"""One serving process: load the index and the encoder, and serve until a signal."""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Callable

from verl_credit_retriever.index.manifest import IndexMismatch, fingerprint
from verl_credit_retriever.serving.parent import end_by_force_after, end_with
from verl_credit_retriever.serving.settings import ServeSettings

DRAIN_SECONDS = 25.0  # queued requests may take this long after SIGTERM
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

    class DrainingServer(uvicorn.Server):
        """Lets the app refuse new requests from the first signal on."""

        def handle_exit(self, sig: int, frame) -> None:
            if not app.state.draining:
                app.state.draining = True
                end_by_force_after(END_SECONDS)
            super().handle_exit(sig, frame)

    config = uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,
        timeout_keep_alive=30,
        timeout_graceful_shutdown=int(DRAIN_SECONDS),
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

    from verl_credit_retriever.encoder.encoder import SentenceEncoder
    from verl_credit_retriever.http.server import create_app, probe
    from verl_credit_retriever.index.search import SearchIndex

    transformers.utils.logging.disable_progress_bar()
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    names = ("verify", "backend", "mmap", "gpu", "nprobe", "ef_search")
    index = SearchIndex.load(settings.index, **{name: getattr(settings, name) for name in names})
    if settings.index_pin not in (None, fingerprint(index.manifest)):
        raise IndexMismatch(
            f"{settings.index}: the index has been replaced since this server started; restart it"
        )
    if settings.threads is not None and index.backend == "faiss":  # the exact backend runs without FAISS
        import faiss

        faiss.omp_set_num_threads(settings.threads)
    encoder = SentenceEncoder.for_index(settings.encoder, index.manifest, device=settings.device)
    app = create_app(index, encoder, limits=settings.limits, token=settings.token)
    probe(index, encoder)
    return app
