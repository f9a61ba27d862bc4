"""verl's sender of weights to vLLM, in the training worker. It stops when vLLM's side has failed, with that side's words:
verl's own waits for the answer to a bucket without end, and looks at the receiver's call only afterwards."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import zmq
from ray.exceptions import RayError
from verl.workers.rollout.vllm_rollout import vllm_rollout

POLL_MS = 500
"""A failure is noticed so much later. A bucket's answer is not delayed."""


class WeightsNotTaken(RuntimeError):
    """vLLM did not load a step's weights."""


class WatchedSocket:
    """A socket that stops waiting when the call that should answer has ended. Before vLLM connects, sending waits too."""

    def __init__(self, socket: zmq.Socket, receiver: Future | None):
        self._socket, self._receiver = socket, receiver

    def recv(self) -> bytes:
        self._wait(zmq.POLLIN)
        return self._socket.recv()

    def send_pyobj(self, message: Any) -> None:
        self._wait(zmq.POLLOUT)
        self._socket.send_pyobj(message)

    def _wait(self, event: int) -> None:
        while not self._socket.poll(POLL_MS, event):
            if self._receiver is not None and self._receiver.done():
                self._receiver.result()  # raises what ended it
                if not self._socket.poll(POLL_MS, event):  # its last answer may arrive after its return
                    raise WeightsNotTaken("the receiver returned before all weights were sent")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._socket, name)


class WatchedSender(vllm_rollout.BucketedWeightSender):
    receiver: Future | None = None
    """The call of this process's adapter that receives; None on a rank that makes no call."""

    def _init_socket(self) -> None:
        super()._init_socket()
        self.socket = WatchedSocket(self.socket, self.receiver)


vllm_rollout.BucketedWeightSender = WatchedSender  # verl's adapter makes it by this name


class ServerAdapter(vllm_rollout.ServerAdapter):
    """verl's adapter. A training worker has one."""

    async def _execute_method(self, method: str, non_block: bool = False, **given: Any) -> Any:
        result = await super()._execute_method(method, non_block=non_block, **given)
        if non_block:
            WatchedSender.receiver = None if result is None else result.future()
        return result

    async def update_weights(self, *args: Any, **kwargs: Any) -> None:
        """Raises WeightsNotTaken."""
        try:
            await super().update_weights(*args, **kwargs)
        except RayError as error:
            words = getattr(error, "cause", None) or error
            raise WeightsNotTaken(f"vLLM did not take the weights: {words}") from error
