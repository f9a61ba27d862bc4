"""The lab's search server with a pause before every answer, as a search engine far away would make it.

    python evidence/async/slow_search.py --lab DIR --seconds 0.5 --port-file FILE

DIR holds the lab's files. Every search waits that long by itself: many can wait at a time. Loopback alone.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path

import uvicorn
from fastapi import FastAPI

from verl_credit_retriever.encoder import SentenceEncoder
from verl_credit_retriever.http.server import create_app
from verl_credit_retriever.index.search import SearchIndex


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--lab", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=0.5)
    parser.add_argument("--port-file", type=Path, required=True)
    options = parser.parse_args()
    index = SearchIndex.load(options.lab / "index")
    encoder = SentenceEncoder.for_index(options.lab / "encoder", index.manifest)
    app = slowed(create_app(index, encoder), options.seconds)
    listener = socket.create_server(("127.0.0.1", 0))
    written = options.port_file.with_suffix(".tmp")
    written.write_text(str(listener.getsockname()[1]))
    os.replace(written, options.port_file)
    asyncio.run(uvicorn.Server(uvicorn.Config(app, log_level="warning")).serve(sockets=[listener]))


def slowed(app: FastAPI, seconds: float, pause: Callable[[float], Awaitable] = asyncio.sleep) -> FastAPI:
    """The same, with a pause before every search."""

    @app.middleware("http")
    async def wait(request, call_next):
        if request.method == "POST":
            await pause(seconds)
        return await call_next(request)

    return app


if __name__ == "__main__":
    main()
