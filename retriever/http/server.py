"""The HTTP interface: Search-R1's POST /retrieve, health, metrics and /info."""

import asyncio
import json
import logging
from collections.abc import Collection, Coroutine
from contextlib import asynccontextmanager
from dataclasses import asdict
from io import BytesIO
from typing import Annotated

from fastapi import FastAPI, Header, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import BaseModel, BeforeValidator, Field, StrictBool
from starlette.exceptions import HTTPException

from verl_credit_retriever.http.batcher import Batcher, QueueFull
from verl_credit_retriever.http.engine import Engine, Hits
from verl_credit_retriever.http.guard import Guard
from verl_credit_retriever.http.metrics import ServerMetrics
from verl_credit_retriever.http.waiting import DeadlineExceeded
from verl_credit_retriever.settings import Limits

SEARCH = 'POST /retrieve with {"queries": ["a text", ...], "topk": 3, "return_scores": true}, as of Search-R1'
CANARY = "who founded the town by the river"
CANARY_SECONDS = 10.0
HITS_IN_THE_LOOP = 1000  # an answer of more is written in a thread
INDEX_HEADER = "X-Index-Fingerprint"
CLIENT_GONE = 499  # the client has left; the status is only counted
log = logging.getLogger("verl_credit_retriever")


def _digits(text: str) -> str:
    """Accepts digits only: Python's int() would also read 1_000, +5000 and blanks."""
    if not (text.isascii() and text.isdigit()):
        raise ValueError(f"{text[:40]!r}; expected digits alone")
    return text


def _whole(value: object) -> object:
    # JSON takes 3.0 as an integer. Strings and booleans stay refused.
    return int(value) if isinstance(value, float) and value.is_integer() else value


DeadlineMs = Annotated[int, Field(ge=0, le=2**31), BeforeValidator(_digits), Header()]
"""The milliseconds that the client will still wait, counted from the request."""


class RetrieveRequest(BaseModel):
    """Body of POST /retrieve, with Search-R1's names and defaults; unknown fields are ignored."""

    queries: list[str]
    topk: Annotated[int, Field(strict=True, ge=0), BeforeValidator(_whole)] | None = None
    """Documents per query; 0, null or nothing: the server's default."""
    return_scores: StrictBool = False


def create_app(
    index,
    encoder,
    *,
    limits: Limits | None = None,
    token: str | None = None,
    hosts: Collection[str] | None = None,
) -> FastAPI:
    """The search service over one index and the encoder that built it (docs/retriever.md has its routes and statuses).

    /retrieve takes what Search-R1's server takes: an empty list of queries, "", more queries than fit the queue (in
    pieces), queries that are too long (cut) or no valid text (mended). While `app.state.draining` is set searches get 503.
    `token` and `hosts` are those of `Guard`. Errors: IndexMismatch when `encoder` did not build `index`.
    """
    limits = limits or Limits()
    index.check_encoder(encoder)
    metrics = ServerMetrics()
    named, told = {INDEX_HEADER: index.fingerprint}, set()
    batcher = Batcher(Engine(index, encoder, metrics), limits, metrics)

    @asynccontextmanager
    async def lifespan(_: FastAPI):
        yield
        batcher.close()

    app = FastAPI(lifespan=lifespan, openapi_url=None, redirect_slashes=False)
    app.state.draining = False
    app.add_middleware(
        Guard,
        state=app.state,
        token=token,
        hosts=hosts,
        max_body_bytes=limits.max_body_bytes,
        metrics=metrics,
    )
    _add_error_answers(app)

    async def in_pieces(queries: list[str], k: int, deadline: float | None) -> list[Hits]:
        hits_N, most = [], limits.max_request_queries
        for start in range(0, len(queries), most):
            hits_N += await batcher.submit(queries[start : start + most], k, deadline=deadline)
        return hits_N

    def mended(queries: list[str]) -> list[str]:
        whole, numbers = limits.mended(queries)
        for reason, number in numbers.items():
            metrics.mended.labels(reason).inc(number)
            if number and reason not in told:
                told.add(reason)
                log.warning("%d queries of a request were mended: %s (logged once)", number, reason)
        return whole

    async def search(request: Request, queries: list[str], k: int, deadline_ms: int | None) -> list[Hits]:
        if app.state.draining:
            raise HTTPException(503, "the server is ending", {"Retry-After": "1"})
        deadline = None if deadline_ms is None else request.scope["arrived"] + deadline_ms / 1000
        try:
            return await _while_connected(request, in_pieces(queries, k, deadline))
        except QueueFull as full:
            raise HTTPException(429, str(full), {"Retry-After": str(full.retry_after)}) from None
        except DeadlineExceeded:
            raise HTTPException(504, f"no answer within X-Deadline-Ms={deadline_ms}") from None
        except HTTPException:
            raise
        except Exception as error:
            log.exception("search failed for %d queries", len(queries))
            raise HTTPException(500, f"{type(error).__name__}: {error}") from None

    async def answer(hits_N: list[Hits], scores: bool) -> Response:
        def render() -> bytes:
            with metrics.stage("serialize"):
                body = BytesIO()  # a large answer is in memory once
                body.write(b'{"result":[')
                for row, hits in enumerate(hits_N):
                    documents = [{"document": d, "score": s} if scores else d for d, s in hits]
                    body.write(b"," * (row > 0) + _json(documents))
                body.write(b"]}")
                return body.getvalue()

        # A thread writes a large answer, so that the event loop has its turn between two queries.
        large = sum(map(len, hits_N)) > HITS_IN_THE_LOOP
        body = await asyncio.to_thread(render) if large else render()
        return Response(body, media_type="application/json", headers=named)

    @app.post("/retrieve")
    async def retrieve(request: Request, body: RetrieveRequest, x_deadline_ms: DeadlineMs = None) -> Response:
        k = body.topk or limits.default_topk
        if problem := limits.refusal(len(body.queries), k):
            raise HTTPException(422, problem)
        return await answer(await search(request, mended(body.queries), k, x_deadline_ms), body.return_scores)

    served = {"fingerprint": index.fingerprint, "default_topk": limits.default_topk}
    _add_state_routes(app, batcher, metrics, {**index.manifest, **served, "limits": asdict(limits)})
    return app


def _json(value) -> bytes:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()


def _add_state_routes(app: FastAPI, batcher: Batcher, metrics: ServerMetrics, description: dict) -> None:
    canary: asyncio.Task | None = None

    async def ask_canary() -> None:
        # All probes share one canary, so that at most one is searched at a time.
        nonlocal canary
        if canary is None or canary.done():
            canary = asyncio.create_task(batcher.submit([CANARY], 1, canary=True))
        await asyncio.wait_for(asyncio.shield(canary), CANARY_SECONDS)

    @app.get("/livez")
    async def livez() -> Response:
        return JSONResponse({"status": "alive"})

    @app.get("/readyz")
    async def readyz() -> Response:
        if app.state.draining:
            return JSONResponse({"status": "not ready", "error": "the server is ending"}, 503)
        try:
            await ask_canary()
        except Exception as error:
            log.exception("the canary query failed")
            return JSONResponse({"status": "not ready", "error": f"{type(error).__name__}: {error}"}, 503)
        return JSONResponse({"status": "ready"})

    @app.get("/metrics")
    async def render_metrics() -> Response:
        return Response(metrics.render(), headers={"Content-Type": CONTENT_TYPE_LATEST})

    @app.get("/info")
    async def info() -> dict:
        return description


def _add_error_answers(app: FastAPI) -> None:
    @app.exception_handler(RequestValidationError)
    async def malformed(request: Request, error: RequestValidationError) -> JSONResponse:
        kind = request.headers.get("content-type", "")
        if request.method == "POST" and "json" not in kind.lower():  # FastAPI then reads the body as a text
            return JSONResponse({"error": f"Content-Type: {kind[:80]!r}; expected application/json"}, 422)
        # FastAPI's default answer echoes the input, which may be large or not encodable.
        lines = [f"{'.'.join(map(str, e['loc'][1:])) or 'body'}: {e['msg']}" for e in error.errors()[:5]]
        return JSONResponse({"error": "; ".join(lines)[:500]}, 422)

    @app.exception_handler(HTTPException)
    async def refused(request: Request, error: HTTPException) -> JSONResponse:
        # FastAPI answers 400 for bytes that are not UTF-8, and 422 for all other faults of a body.
        status = 422 if error.status_code == 400 else error.status_code
        detail = str(error.detail)
        if status == 404:  # such as POST /search of ReSearch's clients
            detail = f"there is no {request.method} {request.url.path[:40]!r}; a search is {SEARCH}"
        return JSONResponse({"error": detail}, status, error.headers)


async def _while_connected(request: Request, work: Coroutine):
    """Returns the result of `work` and cancels it when the client disconnects. Errors: HTTPException 499 then."""

    async def wait_for_disconnect() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    working, leaving = asyncio.create_task(work), asyncio.create_task(wait_for_disconnect())
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise HTTPException(CLIENT_GONE, "the client has gone")
    finally:
        working.cancel()
        leaving.cancel()
