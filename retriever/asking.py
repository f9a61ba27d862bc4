"""What servers answer to queries, read with bounds and judged as answers."""

import asyncio
import json
import math
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import httpx

TIE = 1e-5  # scores this close (relative above 1) count as equal; a vector depends on its batch by less
AT_A_TIME = 8
BUSY_S, BUSY_PAUSE_S = 120.0, 0.2
MOST_BYTES = 8 << 20
"""A longer body is not read on, as by the client of `verl_credit`."""


class MalformedAnswer(ValueError):
    """A 200 whose body does not answer the request."""


@dataclass(frozen=True)
class Served:
    """A hit of an answer."""

    id: str
    contents: str
    score: float


def parse_served(body: object, k: int, rows: int) -> list[Served]:
    """The hits of a POST /retrieve answer to one query with return_scores, best first.

    Errors: MalformedAnswer unless there are exactly min(k, rows) different documents with finite scores that
    do not rise.
    """
    try:
        (hits,) = body["result"]
        served = [Served(hit["document"]["id"], hit["document"]["contents"], hit["score"]) for hit in hits]
    except (KeyError, TypeError, ValueError) as error:
        raise MalformedAnswer(f"not one list of hits with document and score: {error!r}") from None
    if len(served) != min(k, rows):
        raise MalformedAnswer(f"{len(served)} hits; expected {min(k, rows)} (k={k}, {rows} rows)")
    for hit in served:
        if not isinstance(hit.id, str) or not isinstance(hit.contents, str) or not hit.contents:
            raise MalformedAnswer(f"document {hit.id!r} has no text id and contents")
        number = isinstance(hit.score, int | float) and not isinstance(hit.score, bool)
        if not number or not math.isfinite(hit.score):
            raise MalformedAnswer(f"document {hit.id!r}: score={hit.score!r}; expected a finite number")
    if len({hit.id for hit in served}) != len(served):
        raise MalformedAnswer("a document is there twice")
    if any(just_below(after.score) > before.score for before, after in pairwise(served)):
        raise MalformedAnswer("scores rise: the hits are not best first")
    return served


def just_below(score: float) -> float:
    """The lowest score that is taken as equal to `score`."""
    return score - TIE * max(1.0, abs(score))


@dataclass
class Replies:
    """A server's replies: numbers by status or error, answers by place in the list of queries, and malformed ones."""

    statuses: Counter = field(default_factory=Counter)
    answers: dict[int, list[Served]] = field(default_factory=dict)
    malformed: list[str] = field(default_factory=list)
    fingerprint: str = ""


async def ask(url: str, queries: Sequence[str], k: int, *, rows: int, token: str | None) -> Replies:
    """Send every query as a request of its own. No error of the server is raised: all are counted."""
    replies, waiting = Replies(), iter(enumerate(queries))

    async def next_ones() -> None:
        for place, query in waiting:
            try:
                status, body = await post(client, f"{url}/retrieve", query, k)
                replies.statuses[str(status)] += 1
                if status == 200:
                    replies.answers[place] = parse_served(json.loads(body), k, rows)
            except httpx.HTTPError as error:
                replies.statuses[type(error).__name__] += 1
            except (ValueError, RecursionError) as error:  # malformed, or no JSON
                replies.malformed.append(f"{query[:80]!r}: {error}")

    headers = {"Accept-Encoding": "identity"}
    headers |= {} if token is None else {"Authorization": f"Bearer {token}"}
    # The environment's proxies are not used.
    async with httpx.AsyncClient(headers=headers, timeout=60.0, trust_env=False) as client:
        await asyncio.gather(*(next_ones() for _ in range(AT_A_TIME)))
        replies.fingerprint = await served_fingerprint(client, url)
    return replies


async def post(client: httpx.AsyncClient, url: str, query: str, k: int) -> tuple[int, bytes]:
    busy_until = time.monotonic() + BUSY_S
    while True:
        request = {"queries": [query], "topk": k, "return_scores": True}
        status, body = await read(client, "POST", url, json=request)
        if status not in (429, 503) or time.monotonic() >= busy_until:
            return status, body
        await asyncio.sleep(BUSY_PAUSE_S)


async def read(client: httpx.AsyncClient, method: str, url: str, **options) -> tuple[int, bytes]:
    """Status and body. Errors: MalformedAnswer for a body of more than MOST_BYTES, and for a compressed one, of which a few
    bytes can become gigabytes."""
    body = bytearray()
    async with client.stream(method, url, **options) as answer:
        if (encoding := answer.headers.get("Content-Encoding", "identity")) != "identity":
            raise MalformedAnswer(f"Content-Encoding: {encoding[:40]!r}; identity was asked for")
        async for piece in answer.aiter_raw():
            body += piece
            if len(body) > MOST_BYTES:
                raise MalformedAnswer(f"more than {MOST_BYTES} bytes, the most that is read")
        return answer.status_code, bytes(body)


async def served_fingerprint(client: httpx.AsyncClient, url: str) -> str:
    try:
        status, body = await read(client, "GET", f"{url}/info", timeout=30)
        if status != 200:
            raise ValueError(f"status {status}")
        return str(json.loads(body)["fingerprint"])
    except (httpx.HTTPError, ValueError, KeyError, TypeError, RecursionError) as error:
        return f"none: GET /info: {type(error).__name__} {error}"
