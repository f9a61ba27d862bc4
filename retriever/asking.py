"""What servers answer to queries, and whether these are answers."""

import asyncio
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
                answer = await post(client, f"{url}/retrieve", query, k)
                replies.statuses[str(answer.status_code)] += 1
                if answer.status_code == 200:
                    replies.answers[place] = parse_served(answer.json(), k, rows)
            except httpx.HTTPError as error:
                replies.statuses[type(error).__name__] += 1
            except (ValueError, RecursionError) as error:  # malformed, or no JSON
                replies.malformed.append(f"{query[:80]!r}: {error}")

    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    # The environment's proxies are not used.
    async with httpx.AsyncClient(headers=headers, timeout=60.0, trust_env=False) as client:
        await asyncio.gather(*(next_ones() for _ in range(AT_A_TIME)))
        replies.fingerprint = await served_fingerprint(client, url)
    return replies


async def post(client: httpx.AsyncClient, url: str, query: str, k: int) -> httpx.Response:
    busy_until = time.monotonic() + BUSY_S
    while True:
        answer = await client.post(url, json={"queries": [query], "topk": k, "return_scores": True})
        if answer.status_code not in (429, 503) or time.monotonic() >= busy_until:
            return answer
        await asyncio.sleep(BUSY_PAUSE_S)


async def served_fingerprint(client: httpx.AsyncClient, url: str) -> str:
    try:
        return str((await client.get(f"{url}/info")).raise_for_status().json()["fingerprint"])
    except (httpx.HTTPError, ValueError, KeyError, TypeError, RecursionError) as error:
        return f"none: GET /info: {type(error).__name__} {error}"
