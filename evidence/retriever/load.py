"""Sends single queries to servers under load, and records latencies, statuses and malformed answers."""

import asyncio
import itertools
import math
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import httpx

from verl_credit_retriever.asking import Served, parse_served

BUSY_PAUSE_S = 0.2


@dataclass
class Load:
    """The result of a load run. Latencies are those of answers with status 200, in seconds."""

    wall_s: float = 0.0
    latencies_s: list[float] = field(default_factory=list)
    statuses: Counter = field(default_factory=Counter)  # "200", "429", ..., or the name of a transport error
    asked_again: int = 0  # after a 429 or 503
    malformed: list[str] = field(default_factory=list)
    answers: dict[int, list[Served]] = field(default_factory=dict)  # by place in the list of queries

    def percentile_ms(self, share: float) -> float | None:
        """The smallest latency that at least `share` of the answers do not exceed; None without answers."""
        if not self.latencies_s:
            return None
        ordered = sorted(self.latencies_s)
        return 1000 * ordered[math.ceil(round(share * len(ordered), 6)) - 1]

    def numbers(self) -> dict:
        """JSON: throughput in answers per second, latencies in ms, counts by status."""
        latencies = {f"p{name}_ms": self.percentile_ms(name / 100) for name in (50, 95, 99)}
        return {
            "requests": sum(self.statuses.values()),
            "seconds": self.wall_s,
            "answers_per_s": len(self.latencies_s) / max(self.wall_s, 1e-9),
            **latencies,
            "statuses": dict(sorted(self.statuses.items())),
            "malformed": len(self.malformed),
        }


async def send_all(
    urls: Sequence[str],
    queries: Sequence[str],
    k: int,
    *,
    rows: int,
    concurrency: int,
    token: str | None = None,
    timeout_s: float = 60.0,
    busy_s: float = 0.0,
    busy_pause_s: float = BUSY_PAUSE_S,
    keep: bool = False,
) -> Load:
    """Send every query once as a separate request, `concurrency` at a time, the servers in turn.

    A 429 or 503 is sent again after `busy_pause_s` while the query is younger than `busy_s` (0: never). `keep`
    keeps the parsed answers. No error of a server is raised: all are counted.
    """
    load, waiting = Load(), iter(enumerate(queries))
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    tls = httpx.create_ssl_context(trust_env=False)

    async def client_of_many() -> None:
        # One pool per client: httpx examines all of a pool's connections for every request, and the time for 64 of
        # them would count as the server's. The environment's proxies are not used.
        async with httpx.AsyncClient(
            headers=headers, timeout=timeout_s, trust_env=False, verify=tls
        ) as client:
            for place, query in waiting:
                url, begin = urls[place % len(urls)], time.monotonic()
                try:
                    answer, tries = await _post(client, url, query, k, begin + busy_s, busy_pause_s)
                except httpx.HTTPError as error:
                    load.statuses[type(error).__name__] += 1
                    continue
                seconds = time.monotonic() - begin
                load.statuses[str(answer.status_code)] += 1
                load.asked_again += tries - 1
                if answer.status_code == 200:
                    load.latencies_s.append(seconds)
                    take(place, url, answer)

    def take(place: int, url: str, answer: httpx.Response) -> None:
        try:
            served = parse_served(answer.json(), k, rows)
        except (ValueError, RecursionError) as error:  # malformed, or no JSON
            load.malformed.append(f"{url}, {queries[place][:80]!r}: {error}")
            return
        if keep:
            load.answers[place] = served

    begin = time.monotonic()
    await asyncio.gather(*(client_of_many() for _ in range(concurrency)))
    load.wall_s = time.monotonic() - begin
    return load


async def _post(
    client: httpx.AsyncClient, url: str, query: str, k: int, busy_until: float, busy_pause_s: float
) -> tuple[httpx.Response, int]:
    """The last answer, and how often the query was sent."""
    body = {"queries": [query], "topk": k, "return_scores": True}
    for tries in itertools.count(1):
        answer = await client.post(f"{url}/retrieve", json=body)
        if answer.status_code not in (429, 503) or time.monotonic() >= busy_until:
            return answer, tries
        await asyncio.sleep(busy_pause_s)
