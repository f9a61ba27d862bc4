"""Request bodies and answers of the HTTP interface, from which its OpenAPI document is generated."""

import json
from typing import Annotated

from fastapi import Request
from fastapi.routing import APIRoute
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StrictBool, StringConstraints
from starlette.exceptions import HTTPException

from verl_credit_retriever.settings import Limits


def _whole(value: object) -> object:
    # JSON Schema takes 3.0 as an integer. Strings and booleans stay refused.
    return int(value) if isinstance(value, float) and value.is_integer() else value


Count = Annotated[int, Field(strict=True, ge=1), BeforeValidator(_whole)]
CountOrDefault = Annotated[int, Field(strict=True, ge=0), BeforeValidator(_whole)]


class RetrieveRequest(BaseModel):
    """Body of POST /retrieve, with Search-R1's names and defaults; unknown fields are ignored."""

    queries: list[str]
    topk: CountOrDefault | None = None
    """Documents per query; 0, null or nothing: the server's default."""
    return_scores: StrictBool = False


class Document(BaseModel):
    id: str
    contents: str
    url: str | None = None
    """Where the corpus has one."""


class ScoredDocument(BaseModel):
    document: Document
    score: float


class RetrieveAnswer(BaseModel):
    """The hits of each query, best first."""

    result: list[list[ScoredDocument]] | list[list[Document]]


class SearchRequest(BaseModel):
    """Body of POST /v1/search: all fields are required, and others are refused."""

    model_config = ConfigDict(extra="forbid")

    queries: Annotated[list[Annotated[str, StringConstraints(pattern=r"\S")]], Field(min_length=1)]
    """Texts that are not blank."""
    k: Count
    """Documents per query; more than the number of rows gives all rows."""


class Hit(BaseModel):
    id: str
    contents: str
    score: float


class SearchAnswer(BaseModel):
    fingerprint: str
    """The index that answered. The same text, k and fingerprint give the same answer."""
    results: list[list[Hit]]
    """The hits of each query, best first."""


class Problem(BaseModel):
    """The body of every error."""

    error: str


class Status(BaseModel):
    status: str
    error: str | None = None


PROBLEMS = {
    401: "The bearer token is missing or wrong",
    408: "The body did not arrive in time",
    413: "The body is too large",
    421: "The Host header names another server",
    422: "The body is malformed or outside the limits; the field is named",
    429: "Too many queries wait; try again after Retry-After",
    500: "Encoding or searching failed",
    503: "The server is ending, or too many bodies arrive at a time; try again after Retry-After",
    504: "X-Deadline-Ms passed before there was an answer",
}


def problems(*codes: int) -> dict[int, dict]:
    """The `responses` of a route that can fail with these codes."""
    return {code: {"model": Problem, "description": PROBLEMS[code]} for code in codes}


def add_limits(document: dict, limits: Limits) -> dict:
    """The OpenAPI `document` with a server's limits in its request bodies (in place)."""
    for name, k_name in {"RetrieveRequest": "topk", "SearchRequest": "k"}.items():
        fields = document["components"]["schemas"][name]["properties"]
        if name == "SearchRequest":  # /retrieve cuts, and works in pieces
            fields["queries"]["maxItems"] = limits.max_request_queries
            fields["queries"]["items"]["maxLength"] = limits.max_query_chars
        for k in fields[k_name].get("anyOf", [fields[k_name]]):
            if k["type"] == "integer":
                k["maximum"] = limits.max_topk
    return document


def _object(pairs: list[tuple[str, object]]) -> dict:
    value_of = {}
    for name, value in pairs:
        if name in value_of:
            raise HTTPException(422, f"{name[:40]!r} occurs twice in the body")
        value_of[name] = value
    return value_of


def _refuse(constant: str):
    raise HTTPException(422, f"body: {constant} is not JSON")


class StrictJsonRoute(APIRoute):
    """A route whose bodies are JSON without what Python accepts beyond it.

    Errors: json.JSONDecodeError; HTTPException 422 for NaN, Infinity, and a name that occurs twice in an object: its
    values contradict each other.
    """

    def get_route_handler(self):
        handle = super().get_route_handler()

        async def strict(request: Request):
            return await handle(_Request(request.scope, request.receive))

        return strict


class _Request(Request):
    async def json(self):
        if not hasattr(self, "_json"):
            self._json = json.loads(await self.body(), object_pairs_hook=_object, parse_constant=_refuse)
        return self._json
