"""Concurrent requests share one encoder call: whatever waits while a batch runs becomes the next batch."""

import asyncio
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

Hits = list[tuple[dict, float]]


@dataclass
class _Request:
    queries: list[str]
    k: int
    answer: asyncio.Future


class Batcher:
    """Runs `search(queries, k) -> one hit list per query` in one worker thread, for all waiting requests.

    There is no waiting time to tune: an idle server starts at once, a busy one collects up to
    `max_batch_queries` queries (one larger request goes alone) while the batch before runs. A batch is
    searched with its largest k and cut per request. If a batch fails its requests run again one by
    one, so that a request fails only by its own fault, with the exception that `search` raised. Lives in one
    event loop.
    """

    def __init__(self, search: Callable[[list[str], int], list[Hits]], *, max_batch_queries: int = 256):
        if max_batch_queries < 1:
            raise ValueError(f"max_batch_queries={max_batch_queries}; at least 1")
        self._search, self._max_batch_queries = search, max_batch_queries
        self._waiting: deque[_Request] = deque()
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="search")
        self._drainer: asyncio.Task | None = None

    async def submit(self, queries: list[str], k: int) -> list[Hits]:
        """The k best documents of every query; raises what the search raised."""
        request = _Request(queries, k, asyncio.get_running_loop().create_future())
        self._waiting.append(request)
        if self._drainer is None or self._drainer.done():
            self._drainer = asyncio.create_task(self._drain())
        return await request.answer

    def close(self) -> None:
        """Let the running batch end and take no more."""
        self._worker.shutdown(wait=True, cancel_futures=True)

    async def _drain(self) -> None:
        while self._waiting:
            batch = self._take()
            if batch and not await self._answer(batch) and len(batch) > 1:
                for request in batch:
                    await self._answer([request])

    def _take(self) -> list[_Request]:
        batch, size = [], 0
        while self._waiting and (
            not batch or size + len(self._waiting[0].queries) <= self._max_batch_queries
        ):
            request = self._waiting.popleft()
            if not request.answer.done():  # cancelled while it waited
                batch.append(request)
                size += len(request.queries)
        return batch

    async def _answer(self, batch: list[_Request]) -> bool:
        """Search for a batch; False when it failed. A lone request is told why."""
        queries = [query for request in batch for query in request.queries]
        try:
            call = (self._search, queries, max(request.k for request in batch))
            hits = await asyncio.get_running_loop().run_in_executor(self._worker, *call)
            if len(hits) != len(queries):
                raise RuntimeError(f"the search answered {len(hits)} of {len(queries)} queries")
        except Exception as error:
            if len(batch) == 1 and not batch[0].answer.done():
                batch[0].answer.set_exception(error)
            return False
        start = 0
        for request in batch:
            end = start + len(request.queries)
            if not request.answer.done():
                request.answer.set_result([found[: request.k] for found in hits[start:end]])
            start = end
        return True
