"""The three calls that make an answer (tokenize, encode, search), each in its own thread, and the cache of answers."""

import asyncio
import ctypes
import math
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from verl_credit_retriever.http.metrics import ServerMetrics

Hits = list[tuple[dict, float]]
ENTRY_BYTES = 400  # an entry's key, list and dictionaries, without their texts
HIT_BYTES = 300
FREED_EVERY_S = 0.25


class BadHits(RuntimeError):
    """The index gave an impossible answer; the request is not at fault."""


class Engine:
    """Runs an encoder and the index it built without blocking the event loop.

    Each stage has one thread: calls of one stage run one after the other (a tokenizer is not thread-safe), and the
    encoder can work on a batch while the previous one is searched. The calls raise the errors of encoder and index,
    always as an Exception, and RuntimeError for an impossible answer.
    """

    def __init__(self, index, encoder, metrics: ServerMetrics):
        self._index, self._encoder, self._metrics = index, encoder, metrics
        self._trim, self._trimmed = getattr(ctypes.CDLL(None), "malloc_trim", None), time.monotonic()
        self._threads = {name: ThreadPoolExecutor(1, name) for name in ("tokenize", "encode", "search")}
        self.rows = len(index)

    async def tokenize(self, queries: list[str]) -> list[list[int]]:
        """Token ids of every query, prefix and special tokens included."""
        ids_N = await self._run("tokenize", self._encoder.tokenize_queries, queries)
        if len(ids_N) != len(queries):
            raise RuntimeError(f"the tokenizer gave {len(ids_N)} texts for {len(queries)}")
        return ids_N

    async def encode(self, ids_N: list[list[int]]) -> np.ndarray:
        """Vectors of tokenized queries: float32 [N, D], finite."""
        vectors_N_D = await self._run("encode", self._encode, ids_N)
        if len(vectors_N_D) != len(ids_N) or not np.isfinite(vectors_N_D).all():
            raise RuntimeError(
                f"the encoder gave vectors of shape {vectors_N_D.shape} for {len(ids_N)} texts, "
                "or values that are not finite"
            )
        return vectors_N_D

    async def search(self, vectors_N_D: np.ndarray, k: int) -> list[Hits]:
        """The k best (document, score) of every vector, best first. Errors: BadHits, also for a document that is missing
        or occurs twice."""
        hits_N = await self._run("search", self._index.search, vectors_N_D, k)
        if len(hits_N) != len(vectors_N_D):
            raise BadHits(f"the search answered {len(hits_N)} of {len(vectors_N_D)} queries")
        for hits in hits_N:
            if len(hits) != k:
                raise BadHits(f"the search gave {len(hits)} hits for a query; expected {k}")
            last = math.inf
            for document, score in hits:
                if not (isinstance(document, dict) and {"id", "contents"} <= document.keys()):
                    raise BadHits(f"the search gave a hit without a document: {str(document)[:80]!r}")
                if not (math.isfinite(score) and score <= last):
                    raise BadHits(f"the search gave score {score} after {last}; expected finite and falling")
                last = score
            if len({document["id"] for document, _ in hits}) != len(hits):
                raise BadHits("the search gave a document twice")
        return hits_N

    def close(self) -> None:
        """Accept no more calls, without waiting for a running one."""
        for thread in self._threads.values():
            thread.shutdown(wait=False, cancel_futures=True)
        self._threads = {}

    def _encode(self, ids_N: list[list[int]]) -> np.ndarray:
        """Batches of many shapes leave holes in the heap of the encoder's thread, which glibc keeps: it grew for as long as
        there was load. Between two batches they are given back.

        Measured with all-MiniLM-L6-v2 on a CPU: giving the holes back costs 2 % of processor time; mapping every large
        tensor by itself (M_MMAP_THRESHOLD) 15 to 20 %. With another C library nothing is done.
        """
        vectors_N_D = self._encoder.encode_tokens(ids_N)
        if self._trim is not None and time.monotonic() - self._trimmed >= FREED_EVERY_S:
            self._trim(0)
            self._trimmed = time.monotonic()
        return vectors_N_D

    async def _run(self, stage: str, function: Callable, *arguments):
        if stage not in self._threads:
            raise RuntimeError("the server is ending")

        def timed():
            try:
                with self._metrics.stage(stage):
                    return function(*arguments)
            except StopIteration as error:  # a future cannot hold it, and its waiter would hang
                raise RuntimeError(f"{stage} raised StopIteration: {error}") from error
            except Exception:
                raise
            except BaseException as error:
                # The panic of a tokenizer written in Rust, for example, would end the drainer task, and all waiting
                # requests would hang.
                raise RuntimeError(f"{stage} raised {type(error).__name__}: {error}") from error

        return await asyncio.get_running_loop().run_in_executor(self._threads[stage], timed)


class ResultCache:
    """A least-recently-used cache: maps (exact query text, k) to the hits of that query in one index.

    Queries are not normalised, because the encoder may distinguish two spellings. The cache is bounded by
    `max_entries` (0 switches it off) and by `max_bytes` of estimated memory. A kept answer is the same object as the
    first one, so it is bit-equal. For one thread.
    """

    def __init__(self, *, max_entries: int, max_bytes: int):
        self._max_entries, self._max_bytes = max_entries, max_bytes
        self._kept: OrderedDict[tuple[str, int], tuple[Hits, int]] = OrderedDict()
        self.bytes = 0

    def __len__(self) -> int:
        return len(self._kept)

    def get(self, query: str, k: int) -> Hits | None:
        if (query, k) not in self._kept:
            return None
        self._kept.move_to_end((query, k))
        return self._kept[query, k][0]

    def put(self, query: str, k: int, hits: Hits) -> None:
        """Keep an answer, and drop the oldest ones that no longer fit."""
        # Python needs at most four bytes a character, for texts with an emoji in them.
        texts = 4 * len(query) + sum(4 * sum(map(len, d.values())) + HIT_BYTES for d, _ in hits)
        key, size = (query, k), ENTRY_BYTES + texts
        if key in self._kept:
            self.bytes -= self._kept.pop(key)[1]
        if self._max_entries == 0 or size > self._max_bytes:
            return
        self._kept[key] = (hits, size)
        self.bytes += size
        while len(self._kept) > self._max_entries or self.bytes > self._max_bytes:
            self.bytes -= self._kept.popitem(last=False)[1][1]
