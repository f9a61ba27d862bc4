"""The front's side of the shards: every shard is asked, another replica after a lost one; none is left out."""

import time
from collections.abc import Callable, Sequence

import numpy as np
from ray.exceptions import RayError, RayTaskError
from starlette.exceptions import HTTPException

from verl_credit_retriever.deploy.parts import Found, Part

LOOK_SECONDS = 1.0
"""After so long without an answer, and then as often, the shard's living replicas are counted."""
ANSWER_SECONDS = 60.0
"""Longer than Ray needs to notice that a machine has lost its power."""
AGAIN_SECONDS = 0.1
RETRY_AFTER_S = 5


class Asking:
    """Sends a search to one replica of every shard and waits for all. For one thread at a time.

    `handles` are Serve's, one per part. `living(part)` counts a shard's running replicas; its RayError means unknown.
    A replica that is lost while it searches loses nothing: another one is asked. Errors: HTTPException 503 names the
    shard that has no living replica, or that has not answered within ANSWER_SECONDS; the shard's own error.
    """

    def __init__(self, parts: Sequence[Part], handles: Sequence, living: Callable[[Part], int]):
        self._parts, self._handles, self._living = parts, handles, living
        self._absent: Part | None = None

    def __call__(self, vectors_N_D: np.ndarray, k: int) -> list[Found]:
        if self._absent is not None:  # known without waiting for it again
            self._refuse_absent(self._absent)
        deadline = time.monotonic() + ANSWER_SECONDS
        numbers = range(len(self._parts))
        asked = [self._send(number, vectors_N_D, k) for number in numbers]
        try:
            return [self._receive(number, asked, vectors_N_D, k, deadline) for number in numbers]
        except BaseException:
            for response in asked:
                response.cancel()
            raise

    def _send(self, number: int, vectors_N_D: np.ndarray, k: int):
        return self._handles[number].search.remote(self._parts[number], vectors_N_D, k)

    def _receive(self, number: int, asked: list, vectors_N_D: np.ndarray, k: int, deadline: float) -> Found:
        part = self._parts[number]
        while time.monotonic() < deadline:
            try:
                return asked[number].result(timeout_s=LOOK_SECONDS)
            except RayTaskError as error:
                raise error.cause from None
            except TimeoutError:
                self._refuse_absent(part)
            except RayError:  # the replica, or its answer, is lost
                time.sleep(AGAIN_SECONDS)
                asked[number] = self._send(number, vectors_N_D, k)
        raise _unavailable(f"{part} has not answered within {ANSWER_SECONDS:g} s")

    def _refuse_absent(self, part: Part) -> None:
        try:
            self._absent = part if self._living(part) == 0 else None
        except RayError:
            self._absent = None
        if self._absent is not None:
            raise _unavailable(f"{part} has no living replica")


def _unavailable(problem: str) -> HTTPException:
    return HTTPException(503, problem, {"Retry-After": str(RETRY_AFTER_S)})
