"""Collects concurrent requests into batches for one worker thread."""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from verl_credit.policy.generation import Generation
from verl_credit.policy.sampling import SamplingParams


class RequestRejected(RuntimeError):
    """The server rejects requests at the moment."""


class RequestBatcher:
    """Runs `generate` on the waiting requests once no request has arrived for `quiet_seconds`.

    One thread uses the model for one job at a time: a batch, or a job given to `exclusive`. Requests that arrive meanwhile
    form the next batch. An exception in a batch reaches all its requests, and the next batch runs as usual.

    A batch has at most `max_batch_size` requests.
    """

    def __init__(
        self, generate: Callable[..., list[Generation]], *, max_batch_size: int, quiet_seconds: float
    ):
        self._generate, self._max_batch_size, self._quiet = generate, max_batch_size, quiet_seconds
        self._waiting: list[tuple[Sequence[int], SamplingParams, asyncio.Future]] = []
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="hf-rollout")
        self._model_lock, self._open, self._rejecting = asyncio.Lock(), asyncio.Event(), False
        self._open.set()
        self._batches: asyncio.Task | None = None

    async def submit(self, prompt: Sequence[int], params: SamplingParams) -> Generation:
        """The generation for one request; raises RequestRejected while the server rejects requests."""
        if self._rejecting:
            raise RequestRejected("the server rejects requests until resume() is called")
        future = asyncio.get_running_loop().create_future()
        self._waiting.append((prompt, params, future))
        if self._batches is None or self._batches.done():
            self._batches = asyncio.create_task(self._run())
        return await future

    async def exclusive(self, job: Callable[..., Any], *args: Any) -> Any:
        """Run `job` in the worker thread, between batches."""
        async with self._model_lock:
            return await self._in_thread(job, *args)

    async def pause(self, *, reject: bool) -> None:
        """Start no further batch and wait for the running one; waiting requests stay, or fail if `reject`."""
        self._open.clear()
        self._rejecting = reject
        if reject:
            refused, self._waiting = self._waiting, []
            _settle(refused, RequestRejected("the server aborted all requests"))
        async with self._model_lock:
            pass

    def resume(self) -> None:
        """Start batches again."""
        self._rejecting = False
        self._open.set()

    async def drain(self) -> None:
        """Wait until every waiting or running request is answered; after `pause`, those that run."""
        while self._waiting and self._open.is_set():
            await asyncio.sleep(self._quiet)
        async with self._model_lock:
            pass

    async def _run(self) -> None:
        while self._waiting:
            await self._open.wait()
            seen = 0
            while seen < len(self._waiting) < self._max_batch_size:
                seen = len(self._waiting)
                await asyncio.sleep(self._quiet)
            async with self._model_lock:
                if self._open.is_set():  # under the lock, so that no batch can start after pause() returns
                    await self._run_batch()

    async def _run_batch(self) -> None:
        size = self._max_batch_size
        batch, self._waiting = self._waiting[:size], self._waiting[size:]
        batch = [
            entry for entry in batch if not entry[2].done()
        ]  # a caller that gave up cancelled its future
        if batch:
            prompts, params, _ = zip(*batch, strict=True)
            try:
                _settle(batch, await self._in_thread(self._generate, prompts, params))
            except Exception as error:
                _settle(batch, error)

    async def _in_thread(self, job: Callable[..., Any], *args: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._thread, job, *args)


def _settle(batch: Sequence[tuple], results: list[Generation] | Exception) -> None:
    failed = isinstance(results, Exception)
    for (_, _, future), result in zip(batch, [results] * len(batch) if failed else results, strict=True):
        if not future.done():
            (future.set_exception if failed else future.set_result)(result)
