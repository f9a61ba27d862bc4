"""The front's replicas run the app of `serve` over an index that sends each search to every shard. Shards need no torch."""

import os
import time
from collections.abc import Callable, Sequence

import numpy as np
from ray import serve
from ray.exceptions import RayError, RayTaskError
from starlette.exceptions import HTTPException

from verl_credit_retriever.index.parts import Found, Part, ShardedIndex
from verl_credit_retriever.settings import ServeSettings

APP = "verl-credit-retriever"
FRONT = "front"
LOOK_SECONDS = 1.0
"""The living replicas of a shard are counted whenever this time passes without an answer."""
ANSWER_SECONDS = 60.0
"""The limit of a search. It is longer than Ray needs to notice that a machine has no power."""
AGAIN_SECONDS = 0.1
RETRY_AFTER_S = 5


class Asking:
    """Sends a search to one replica of every shard and waits for all. Only one thread at a time may use it.

    `handles` are Serve's, one per part. `living(part)` counts a shard's running replicas; its RayError means unknown.
    When a replica ends while it searches, the search goes to another replica. Errors: HTTPException 503 names the shard
    that has no living replica, or that has not answered within ANSWER_SECONDS; the shard's own error.
    """

    def __init__(self, parts: Sequence[Part], handles: Sequence, living: Callable[[Part], int]):
        self._parts, self._handles, self._living = parts, handles, living
        self._absent: Part | None = None

    def __call__(self, vectors_N_D: np.ndarray, k: int) -> list[Found]:
        if self._absent is not None:  # without this every search would wait for it again
            self._refuse_absent(self._absent)
        deadline = time.monotonic() + ANSWER_SECONDS
        numbers = range(len(self._parts))
        replies = [self._send(number, vectors_N_D, k) for number in numbers]
        try:
            return [self._receive(number, replies, vectors_N_D, k, deadline) for number in numbers]
        except BaseException:
            for reply in replies:
                reply.cancel()
            raise

    def _send(self, number: int, vectors_N_D: np.ndarray, k: int):
        return self._handles[number].search.remote(self._parts[number], vectors_N_D, k)

    def _receive(self, number: int, replies: list, vectors_N_D: np.ndarray, k: int, deadline: float) -> Found:
        part = self._parts[number]
        while time.monotonic() < deadline:
            try:
                return replies[number].result(timeout_s=LOOK_SECONDS)
            except RayTaskError as error:
                raise error.cause from None
            except TimeoutError:
                self._refuse_absent(part)
            except RayError:  # the replica has ended, or its answer did not arrive
                time.sleep(AGAIN_SECONDS)
                replies[number] = self._send(number, vectors_N_D, k)
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


def shard_name(part: Part) -> str:
    return f"shard-{part.number}"


def app_builder(settings: ServeSettings, parts: Sequence[Part]) -> Callable:
    """A function without arguments that makes the app in a replica, as `serve.ingress` takes it."""

    def build():
        return _make_app(settings, parts)

    return build


def _make_app(settings: ServeSettings, parts: Sequence[Part]):
    import torch

    from verl_credit_retriever.encoder import SentenceEncoder
    from verl_credit_retriever.http.server import create_app

    os.environ.pop("PROMETHEUS_MULTIPROC_DIR", None)
    torch.set_num_threads(settings.threads or 1)
    handles = [serve.get_deployment_handle(shard_name(part), APP) for part in parts]
    index = ShardedIndex.open(settings.index, parts, Asking(parts, handles, _living))
    encoder = SentenceEncoder.for_index(settings.encoder, index.manifest, device=settings.device)
    return create_app(index, encoder, limits=settings.limits, token=settings.token, hosts=settings.hosts)


def _living(part: Part) -> int:
    deployments = serve.status().applications[APP].deployments
    return deployments[shard_name(part)].replica_states.get("RUNNING", 0)
