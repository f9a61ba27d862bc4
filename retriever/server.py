"""The HTTP interface: Search-R1's POST /retrieve, liveness, readiness, and what is being served."""

import logging
from contextlib import asynccontextmanager
from typing import Annotated

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel, Field, StrictBool
from starlette.exceptions import HTTPException

from .batcher import Batcher, Hits
from .encoder import SentenceEncoder
from .index import SearchIndex

CANARY = "who founded the town by the river"
log = logging.getLogger("verl_credit_retriever")


class RetrieveRequest(BaseModel):
    """Body of POST /retrieve, with Search-R1's names and defaults; unknown fields are ignored."""

    queries: list[str]
    topk: Annotated[int, Field(strict=True, ge=1)] | None = None
    return_scores: StrictBool = False


def search_once(index: SearchIndex, encoder: SentenceEncoder, queries: list[str], k: int) -> list[Hits]:
    """Encode and search in the calling thread: the k best (document, score) of every query."""
    return index.search(encoder.encode_queries(queries), k)


def create_app(
    index: SearchIndex,
    encoder: SentenceEncoder,
    *,
    default_topk: int = 3,
    max_topk: int = 100,
    max_request_queries: int = 1024,
    max_query_chars: int = 10_000,
    max_batch_queries: int = 256,
) -> FastAPI:
    """The search service over one index and the encoder that built it.

    POST /retrieve {"queries", "topk"?, "return_scores"?} -> {"result": [[hit, ...] per query]}; a hit is
    {"document": {"id", "contents"}, "score"} with return_scores and {"id", "contents"} without. `topk` above
    the rows gives all rows; no query gives an empty result, as Search-R1's server does (its client sends such
    requests); "" is searched like any text. 422 for a malformed body or one over the limits, 500 with
    {"error"} when encoding or searching fails. GET /livez, GET /readyz (a real query, else 503), GET /info.
    Errors: IndexMismatch when `encoder` did not build `index`.
    """
    if not 1 <= default_topk <= max_topk:
        raise ValueError(f"default_topk={default_topk}; expected 1 to max_topk={max_topk}")
    index.check_encoder(encoder)
    batcher = Batcher(
        lambda queries, k: search_once(index, encoder, queries, k), max_batch_queries=max_batch_queries
    )

    @asynccontextmanager
    async def lifespan(_: FastAPI):
        yield
        batcher.close()

    app = FastAPI(title="verl-credit-retriever", lifespan=lifespan, docs_url=None, redoc_url=None)

    @app.exception_handler(RequestValidationError)
    async def malformed(_: Request, error: RequestValidationError) -> JSONResponse:
        # Not the default answer: that echoes the input, which may be large or not even encodable.
        problems = [f"{'.'.join(map(str, e['loc'][1:])) or 'body'}: {e['msg']}" for e in error.errors()[:5]]
        return JSONResponse({"error": "; ".join(problems)}, 422)

    @app.exception_handler(HTTPException)
    async def refused(_: Request, error: HTTPException) -> JSONResponse:
        # FastAPI answers 400 for bytes that are not UTF-8, and 422 for everything else wrong in a body.
        return JSONResponse(
            {"error": str(error.detail)}, 422 if error.status_code == 400 else error.status_code
        )

    @app.post("/retrieve")
    async def retrieve(body: RetrieveRequest) -> JSONResponse:
        if problem := _refusal(body, max_topk, max_request_queries, max_query_chars):
            return JSONResponse({"error": problem}, 422)
        if not body.queries:
            return JSONResponse({"result": []})
        try:
            found = await batcher.submit(body.queries, body.topk or default_topk)
        except Exception as error:
            log.exception("search failed for %d queries", len(body.queries))
            return JSONResponse({"error": f"{type(error).__name__}: {error}"}, 500)
        if body.return_scores:
            return JSONResponse(
                {"result": [[{"document": d, "score": s} for d, s in hits] for hits in found]}
            )
        return JSONResponse({"result": [[document for document, _ in hits] for hits in found]})

    @app.get("/livez")
    async def livez() -> JSONResponse:
        return JSONResponse({"status": "alive"})

    @app.get("/readyz")
    async def readyz() -> JSONResponse:
        try:
            await batcher.submit([CANARY], 1)
        except Exception as error:
            log.exception("the canary query failed")
            return JSONResponse({"status": "not ready", "error": f"{type(error).__name__}: {error}"}, 503)
        return JSONResponse({"status": "ready"})

    @app.get("/info")
    async def info() -> JSONResponse:
        limits = {
            "max_topk": max_topk,
            "max_request_queries": max_request_queries,
            "max_query_chars": max_query_chars,
        }
        return JSONResponse({**index.manifest, "default_topk": default_topk, "limits": limits})

    return app


def _refusal(body: RetrieveRequest, max_topk: int, max_queries: int, max_chars: int) -> str | None:
    if body.topk is not None and body.topk > max_topk:
        return f"topk: {body.topk}; at most {max_topk}"
    if len(body.queries) > max_queries:
        return f"queries: {len(body.queries)} of them; at most {max_queries}"
    for row, query in enumerate(body.queries):
        if len(query) > max_chars:
            return f"queries.{row}: {len(query)} characters; at most {max_chars}"
        if any("\ud800" <= character <= "\udfff" for character in query):
            return f"queries.{row}: holds a lone surrogate, which is not text"
    return None
