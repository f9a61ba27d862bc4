"""Concurrent requests share encoder calls: queries that arrive while a batch runs form the next batches."""

import asyncio
import logging
import math
import time
from collections import deque
from collections.abc import Coroutine

import numpy as np

from verl_credit_retriever.http.engine import Engine, Hits, ResultCache
from verl_credit_retriever.http.metrics import ServerMetrics
from verl_credit_retriever.http.waiting import DeadlineExceeded, Item, Request, WaitingQueries
from verl_credit_retriever.settings import Limits

LONGEST_PAUSE_S = 60
REFUSED_AFTER_S = 5.0
"""How long a request waits for a place in the queue before it is refused. Otherwise clients that repeat at once would
take the processor from the answers."""
HELD = 4096
"""Queries that may wait for a place, or as many as the queue has: more are refused at once, which bounds memory."""
log = logging.getLogger("verl_credit_retriever")


class Pace:
    """A running mean of answered queries per second of work; idle time does not count."""

    def __init__(self, weight: float = 0.3):
        self._weight, self._last = weight, -math.inf
        self.queries_per_s: float | None = None

    def answered(self, queries: int, *, began: float, now: float) -> None:
        """Count a batch that began and ended at these times (seconds of one clock)."""
        # Batches overlap: the time before the last answer is already counted.
        seconds = max(now - max(began, self._last), 1e-6)
        self._last = now
        rate, old = queries / seconds, self.queries_per_s
        self.queries_per_s = rate if old is None else old + self._weight * (rate - old)

    def pause_s(self, waiting: int) -> int:
        """Whole seconds until `waiting` queries are answered: at least 1, at most 60, 1 before any answer."""
        if not self.queries_per_s:
            return 1
        return min(LONGEST_PAUSE_S, max(1, math.ceil(waiting / self.queries_per_s)))


class QueueFull(Exception):
    """More queries wait than the limit allows; `retry_after` is in seconds."""

    def __init__(self, waiting: int, limit: int, retry_after: int):
        super().__init__(f"{waiting} queries wait; at most {limit}; try again in {retry_after} s")
        self.retry_after = retry_after


class Batcher:
    """Answers queries through `engine`, with as few encoder calls as the limits allow.

    There is no waiting time to tune: an idle server starts at once. A busy server collects queries while a batch
    runs, one of each request in turn, up to `limits.max_batch_tokens` (longest text times number of texts). A large
    request is split into several batches. A text that occurs twice in a batch is encoded once. Queries with different
    k are encoded together and searched separately, so that an answer does not depend on the other requests. The next
    batch is encoded while one is searched.

    When a batch fails, its requests run again one by one, so that only the faulty request fails, with the engine's
    exception. For one event loop.
    """

    def __init__(self, engine: Engine, limits: Limits, metrics: ServerMetrics):
        self._engine, self._limits, self._metrics = engine, limits, metrics
        self._cache = ResultCache(max_entries=limits.cache_entries, max_bytes=limits.cache_bytes)
        self._waiting = WaitingQueries(limits, metrics)
        self._open: set[Request] = set()
        self._line: deque[asyncio.Event] = deque()  # requests that wait for a place, in order of arrival
        self._held = 0  # their queries
        self._pace = Pace()
        self._drainer: asyncio.Task | None = None
        self._searching: asyncio.Task | None = None

    async def submit(
        self, queries: list[str], k: int, *, deadline: float | None = None, canary: bool = False
    ) -> list[Hits]:
        """The k best hits of every query (all rows when there are fewer than k).

        `deadline` is a time of the event loop's clock. When it passes or the caller is cancelled, waiting queries are
        dropped before they are encoded. A canary bypasses cache and queue limit and is searched next, by itself.
        Errors: QueueFull, DeadlineExceeded, or the engine's exception.
        """
        loop = asyncio.get_running_loop()
        if deadline is not None and loop.time() >= deadline:
            raise DeadlineExceeded
        k = min(k, self._engine.rows)
        hits = [None if canary else self._cache.get(query, k) for query in queries]
        missing = [row for row, kept in enumerate(hits) if kept is None]
        if not canary:
            if missing:
                await self._admit(len(missing), deadline)
            self._metrics.cache_hits.inc(len(queries) - len(missing))
            self._metrics.cache_misses.inc(len(missing))
        if not missing:
            return hits
        request = Request(loop.create_future(), hits, len(missing), deadline, alone=canary)
        items = [Item(request, row, queries[row], k) for row in missing]
        (self._waiting.put_first if canary else self._waiting.append)(items)
        self._open.add(request)
        self._start()
        try:
            await asyncio.wait([request.answer], timeout=None if deadline is None else deadline - loop.time())
        except asyncio.CancelledError:
            self._drop(request, "disconnected")
            raise
        finally:
            self._open.discard(request)
        if not request.answer.done():
            self._drop(request, "deadline")
            raise DeadlineExceeded
        return request.answer.result()

    def close(self) -> None:
        """Accept no more queries; open requests fail."""
        self._engine.close()
        self._fail(self._open, RuntimeError("the server is ending"))

    async def _admit(self, queries: int, deadline: float | None) -> None:
        """Return once the queries fit and no earlier request waits: otherwise small requests would take all places
        from a large request. Errors: QueueFull, when that is not so for a while; DeadlineExceeded.
        """
        if not self._line and self._fits(queries):
            return
        limit = self._limits.max_queue_queries
        if self._held + queries <= max(HELD, limit):
            until = asyncio.get_running_loop().time() + REFUSED_AFTER_S
            hurried = deadline is not None and deadline <= until
            turn = asyncio.Event()
            self._line.append(turn)
            self._held += queries
            try:
                async with asyncio.timeout_at(deadline if hurried else until):
                    while self._line[0] is not turn or not self._fits(queries):
                        turn.clear()
                        await turn.wait()
                return
            except TimeoutError:
                if hurried:
                    raise DeadlineExceeded from None
            finally:
                self._line.remove(turn)
                self._held -= queries
                self._call_next()
        waiting = len(self._waiting)
        raise QueueFull(waiting, limit, self._pace.pause_s(waiting))

    def _fits(self, queries: int) -> bool:
        return len(self._waiting) + queries <= self._limits.max_queue_queries

    def _call_next(self) -> None:
        """Wake the first in line. It checks for a place when this task pauses, so after this task has queued its items."""
        if self._line:
            self._line[0].set()

    def _drop(self, request: Request, reason: str) -> None:
        self._metrics.dropped.labels(reason).inc(self._waiting.remove(request))
        request.answer.cancel()
        self._call_next()

    def _fail(self, requests, error: Exception) -> None:
        for request in list(requests):
            self._waiting.remove(request)
            request.fail(error)
        self._call_next()

    def _start(self) -> None:
        if self._drainer is None or self._drainer.done():
            self._drainer = self._task(self._drain())

    def _task(self, work: Coroutine) -> asyncio.Task:
        async def guarded() -> None:
            try:
                await work
            except Exception as error:
                log.exception("the batcher failed")
                self._fail(self._open, error)  # otherwise these requests would wait for ever

        return asyncio.create_task(guarded())

    async def _drain(self) -> None:
        while self._waiting:
            fresh = [item for item in self._waiting.together() if item.ids is None]
            if texts := list(dict.fromkeys(item.query for item in fresh)):
                ids_N = await self._try(fresh, self._engine.tokenize(texts))
                if ids_N is None:
                    continue
                ids_of = dict(zip(texts, ids_N, strict=True))
                for item in fresh:
                    item.ids = ids_of[item.query]
            batch, began = self._waiting.take(), time.perf_counter()
            self._call_next()
            if not batch:
                continue
            ids_of = {item.query: item.ids for item in batch}
            vectors_N_D = await self._try(batch, self._engine.encode(list(ids_of.values())))
            if vectors_N_D is None:
                continue
            if self._searching is not None:
                await self._searching
            vector_of = dict(zip(ids_of, vectors_N_D, strict=True))
            self._searching = self._task(self._search(batch, vector_of, began))

    async def _search(self, batch: list[Item], vector_of: dict[str, np.ndarray], began: float) -> None:
        hits_of: dict[tuple[str, int], Hits] = {}
        for k in sorted({item.k for item in batch}):
            queries = list(dict.fromkeys(item.query for item in batch if item.k == k))
            vectors_N_D = np.stack([vector_of[query] for query in queries])
            hits_N = await self._try(batch, self._engine.search(vectors_N_D, k))
            if hits_N is None:
                return self._start()
            hits_of.update({(query, k): hits for query, hits in zip(queries, hits_N, strict=True)})
        for (query, k), hits in hits_of.items():
            self._cache.put(query, k, hits)
        self._metrics.cache_entries.set(len(self._cache))
        self._metrics.cache_bytes.set(self._cache.bytes)
        for item in batch:
            item.request.take_hits(item.row, hits_of[item.query, item.k])
        self._pace.answered(len(batch), began=began, now=time.perf_counter())

    async def _try(self, items: list[Item], call: Coroutine):
        """Returns the result of `call`, or None when it raised: a single request fails then, several run again singly."""
        try:
            return await call
        except Exception as error:
            requests = dict.fromkeys(item.request for item in items)
            if len(requests) == 1:
                self._fail(requests, error)
                return None
            # A request whose client has left may have caused the error, so the others run again.
            self._waiting.put_first([item for item in items if not item.request.answer.done()])
            for request in requests:
                request.alone = True
            return None
