"""The queue of queries that wait for the encoder, and the choice of the next batch."""

import asyncio
import time
from collections import OrderedDict, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import chain, islice, takewhile, zip_longest

from verl_credit_retriever.http.engine import Hits
from verl_credit_retriever.http.metrics import ServerMetrics
from verl_credit_retriever.settings import Limits

LOOK_AHEAD = 512  # queries that are tokenized at a time


class DeadlineExceeded(Exception):
    """The client's deadline has passed."""


@dataclass(eq=False)
class Request:
    """Queries that are answered together; `left` of them have no hits yet."""

    answer: asyncio.Future
    hits: list[Hits | None]
    left: int
    deadline: float | None
    alone: bool = False  # runs without others: a canary, or one of a batch that failed

    def take_hits(self, row: int, hits: Hits) -> None:
        """Fill in one query, and answer when it was the last."""
        self.hits[row], self.left = hits, self.left - 1
        if self.left == 0 and not self.answer.done():
            self.answer.set_result(self.hits)

    def fail(self, error: Exception) -> None:
        if not self.answer.done():
            self.answer.set_exception(error)


@dataclass(eq=False)
class Item:
    """A query of a request."""

    request: Request
    row: int
    query: str
    k: int
    since: float = field(default_factory=time.perf_counter)
    ids: list[int] | None = None


class WaitingQueries:
    """A queue of items per request, cut into batches by tokens. Lives in one event loop.

    Requests take turns, an item each, in order of arrival: a single query does not wait for all of a large request.
    """

    def __init__(self, limits: Limits, metrics: ServerMetrics):
        self._queues: OrderedDict[Request, deque[Item]] = OrderedDict()
        self._count = 0
        self._limits, self._metrics = limits, metrics

    def __len__(self) -> int:
        return self._count

    def append(self, items: Iterable[Item]) -> None:
        for item in items:
            self._queues.setdefault(item.request, deque()).append(item)
            self._count += 1
        self._show()

    def put_first(self, items: list[Item]) -> None:
        """Put items in front of all others; items that wait already keep their place."""
        for item in reversed(items):
            queue = self._queues.setdefault(item.request, deque())
            if item not in queue:
                queue.appendleft(item)
                self._count += 1
                self._queues.move_to_end(item.request, last=False)
        self._show()

    def remove(self, request: Request) -> int:
        """Remove a request's items; returns how many there were."""
        number = len(self._queues.pop(request, ()))
        self._count -= number
        self._show()
        return number

    def together(self) -> list[Item]:
        """The first items that may share a batch: those of a request that runs alone, or in turn those of all before
        such a one."""
        ahead = list(islice(self._queues, LOOK_AHEAD))
        if ahead and ahead[0].alone:
            return list(islice(self._queues[ahead[0]], LOOK_AHEAD))
        sharing = takewhile(lambda request: not request.alone, ahead)
        rounds = zip_longest(*(self._queues[request] for request in sharing))
        return list(islice(filter(None, chain.from_iterable(rounds)), LOOK_AHEAD))

    def take(self) -> list[Item]:
        """The next batch: tokenized items, as long as longest text times different texts fits the budget.

        An item whose deadline has passed is dropped, and its request fails with DeadlineExceeded.
        """
        batch, texts, longest, now = [], set(), 0, asyncio.get_running_loop().time()
        fresh = set()  # requests that came while others were tokenized: their turn is the next batch
        for item in self.together():
            if item.ids is None:
                fresh.add(item.request)
            if item.request in fresh:
                continue
            if item.request.deadline is not None and now >= item.request.deadline:
                self._pop(item)
                item.request.fail(DeadlineExceeded())
                self._metrics.dropped.labels("deadline").inc()
                continue
            wider, more = max(longest, len(item.ids)), len(texts) + (item.query not in texts)
            if batch and wider * more > self._limits.max_batch_tokens:
                break
            self._pop(item)
            batch.append(item)
            texts.add(item.query)
            longest = wider
            self._metrics.stage_seconds.labels("queue").observe(time.perf_counter() - item.since)
        self._show()
        if batch:
            self._metrics.batch_queries.observe(len(texts))
            self._metrics.batch_tokens.observe(longest * len(texts))
        return batch

    def _pop(self, item: Item) -> None:
        """Take the first item of its request, whose next turn is then the last."""
        queue = self._queues[item.request]
        queue.popleft()
        self._count -= 1
        if queue:
            self._queues.move_to_end(item.request)
        else:
            del self._queues[item.request]

    def _show(self) -> None:
        self._metrics.queue_queries.set(self._count)
