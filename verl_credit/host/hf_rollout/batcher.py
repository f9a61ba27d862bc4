"""Collects concurrent requests into batches for one worker thread."""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from math import inf
from typing import Any

from verl_credit.policy.generation import Generation
from verl_credit.policy.sampling import SamplingParams


class RequestRejected(RuntimeError):
    """The server rejects requests at the moment."""


class RequestBatcher:
    """Runs `generate` on the waiting requests once no request has arrived for `quiet_seconds`.

    One thread uses the model for one job at a time: a batch, or a job given to `exclusive`. Requests that arrive meanwhile
    form the next batch. An exception in a batch reaches all its requests, and the next batch runs as usual.

    A batch has at most `max_batch_size` requests, and as many as `max_batch_tokens` hold, each counted with the tokens
    that the longest may have (but never none).
    """

    def __init__(
        self,
        generate: Callable[..., list[Generation]],
        *,
        max_batch_size: int,
        quiet_seconds: float,
        max_batch_tokens: float = inf,
    ):
        self._generate, self._max_batch_size, self._quiet = generate, max_batch_size, quiet_seconds
        self._max_batch_tokens = max_batch_tokens
        self._waiting: list[tuple[Sequence[int], SamplingParams, asyncio.Future]] = []
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="hf-rollout")
        self._model_lock = asyncio.Lock()
        self._open = asyncio.Event()
        self._open.set()
        self._closed = asyncio.Event()
        self._arrived = asyncio.Event()
        self._rejecting = False
        self._loop_task: asyncio.Task | None = None

    async def submit(self, prompt: Sequence[int], params: SamplingParams) -> Generation:
        """The generation for one request; raises RequestRejected while the server rejects requests."""
        if self._rejecting:
            raise RequestRejected("the server rejects requests until resume() is called")
        if self._loop_task is None:
            self._loop_task = asyncio.create_task(self._run())
        future = asyncio.get_running_loop().create_future()
        self._waiting.append((prompt, params, future))
        self._arrived.set()
        return await future

    async def exclusive(self, job: Callable[..., Any], *args: Any) -> Any:
        """Run `job` in the worker thread, between batches."""
        async with self._model_lock:
            return await asyncio.get_running_loop().run_in_executor(self._thread, job, *args)

    async def pause(self, *, reject: bool) -> None:
        """Start no further batch and wait for the running one; waiting requests stay, or fail if `reject`."""
        self._open.clear()
        self._closed.set()
        self._rejecting = reject
        if reject:
            refused, self._waiting = self._waiting, []
            for _, _, future in refused:
                _settle(future, RequestRejected("the server aborted all requests"))
        async with self._model_lock:
            pass

    def resume(self) -> None:
        """Start batches again."""
        self._rejecting = False
        self._closed.clear()
        self._open.set()

    async def drain(self) -> None:
        """Wait until every waiting or running request is answered; after `pause`, those that run."""
        while self._waiting and self._open.is_set():
            paused = asyncio.create_task(self._closed.wait())
            await asyncio.wait(
                [paused, *(future for _, _, future in self._waiting)], return_when=asyncio.FIRST_COMPLETED
            )
            paused.cancel()
        async with self._model_lock:
            pass

    async def _run(self) -> None:
        while True:
            await self._arrived.wait()
            await self._until_quiet()
            async with self._model_lock:
                # Checked under the lock, so that no batch can start after pause() returns.
                if self._open.is_set():
                    await self._run_batch()
            await self._open.wait()
            if not self._waiting:
                self._arrived.clear()

    async def _until_quiet(self) -> None:
        seen = 0
        while seen < len(self._waiting) < self._max_batch_size:
            seen = len(self._waiting)
            await asyncio.sleep(self._quiet)

    def _next_size(self) -> int:
        size, longest = 0, 0
        for prompt, params, _ in self._waiting[: self._max_batch_size]:
            longest = max(longest, len(prompt) + params.max_new_tokens)
            if size and (size + 1) * longest > self._max_batch_tokens:
                break
            size += 1
        return size

    async def _run_batch(self) -> None:
        size = self._next_size()
        batch, self._waiting = self._waiting[:size], self._waiting[size:]
        # A caller that gave up cancelled its future.
        batch = [entry for entry in batch if not entry[2].done()]
        if not batch:
            return
        prompts, params, _ = zip(*batch, strict=True)
        try:
            loop = asyncio.get_running_loop()
            results = await loop.run_in_executor(self._thread, self._generate, prompts, params)
            for (_, _, future), result in zip(batch, results, strict=True):
                _settle(future, result)
        except Exception as error:
            for _, _, future in batch:
                _settle(future, error)


def _settle(future: asyncio.Future, result: Generation | Exception) -> None:
    if not future.done():
        (future.set_exception if isinstance(result, Exception) else future.set_result)(result)
