"""The three calls behind an answer (tokenize, encode, search), each timed and in its own thread."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from verl_credit_retriever.http.freed import FreedMemory
from verl_credit_retriever.http.hits import Hits, check_hits
from verl_credit_retriever.http.metrics import ServerMetrics


class Engine:
    """Runs an encoder and the index it built without blocking the event loop.

    Each stage has one thread: calls of one stage run one after the other (a tokenizer is not thread-safe), and the
    encoder can work on a batch while the previous one is searched. The calls raise the errors of encoder and index,
    always as an Exception, and RuntimeError for an impossible answer.
    """

    def __init__(self, index, encoder, metrics: ServerMetrics):
        self._index, self._encoder, self._metrics = index, encoder, metrics
        self._freed = FreedMemory()
        self._threads: dict[str, ThreadPoolExecutor] = {}
        self.open()
        self.rows, self.fingerprint = len(index), index.fingerprint

    def open(self) -> None:
        """Start the threads, unless they are started."""
        if not self._threads:
            self._threads = {name: ThreadPoolExecutor(1, name) for name in ("tokenize", "encode", "search")}

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
        """The k best (document, score) of every vector, checked."""
        found = await self._run("search", self._index.search, vectors_N_D, k)
        return check_hits(found, queries=len(vectors_N_D), k=k)

    def close(self) -> None:
        """Accept no more calls, without waiting for a running one."""
        for thread in self._threads.values():
            thread.shutdown(wait=False, cancel_futures=True)
        self._threads = {}

    def _encode(self, ids_N: list[list[int]]) -> np.ndarray:
        vectors_N_D = self._encoder.encode_tokens(ids_N)
        self._freed.give_back()
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
                # Such as the panic of a tokenizer written in Rust: it would end the drainer task, and all waiting
                # requests would hang.
                raise RuntimeError(f"{stage} raised {type(error).__name__}: {error}") from error

        return await asyncio.get_running_loop().run_in_executor(self._threads[stage], timed)
