"""`checkpoint_engine.backend=object_store`: a step's weights to rollout servers of their own, through Ray's object store.

verl's other backends need GPUs or RDMA. The trainer's rank 0 sends safetensors documents to the workers beside the servers,
and a worker hands them to its server as they come. `checkpoint_engine.custom_backend_module` names this module, so that verl
imports it in both.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from typing import Any

import ray
import torch
from safetensors.torch import load
from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry

from verl_credit.host.engine import process_group  # noqa: F401  (the import registers loopback://)
from verl_credit.host.hf_rollout.sync import weight_buckets
from verl_credit.host.registry import register_parts

NAME = "object_store"

register_parts()


@CheckpointEngineRegistry.register(NAME)
class ObjectStoreEngine(CheckpointEngine):
    """Every training rank has such an engine, and so has every worker beside a rollout server."""

    def __init__(self, bucket_size: int, is_master: bool = False):
        self._bucket_size, self._is_master = bucket_size, is_master
        self._receivers: list[ray.actor.ActorHandle] = []
        self._arrived: asyncio.Queue[bytes | None] = asyncio.Queue()

    def prepare(self) -> ray.actor.ActorHandle:
        """The actor that this engine is in."""
        return ray.get_runtime_context().current_actor

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[ray.actor.ActorHandle]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        receivers = metadata[actor_wg_world_size:]
        return {"receivers": [receivers] * actor_wg_world_size}, {"receivers": [[]] * rollout_world_size}

    def init_process_group(self, receivers: list[ray.actor.ActorHandle]) -> None:
        self._receivers = receivers

    def finalize(self) -> None:
        self._receivers = []

    async def send_weights(
        self, weights: Iterable[tuple[str, torch.Tensor]], global_steps: int | None = None
    ) -> None:
        """Every step of ``weights`` may be a collective, so that all ranks exhaust it; rank 0 sends."""
        if not self._is_master:
            for _ in weights:
                pass
            return

        async def send(bucket) -> None:
            calls = [one.execute_checkpoint_engine.remote("accept", bucket) for one in self._receivers]
            await asyncio.gather(*calls)

        async for bucket in weight_buckets(weights, {}, dtype=None, bucket_bytes=self._bucket_size):
            await send(ray.put(bucket))
        await send(None)

    def accept(self, bucket: bytes | None) -> None:
        """Receives one bucket; None ends the update."""
        self._arrived.put_nowait(bucket)

    async def receive_weights(
        self, global_steps: int | None = None
    ) -> AsyncIterator[tuple[str, torch.Tensor]]:
        while (bucket := await self._arrived.get()) is not None:
            for name, tensor in load(bucket).items():
                yield name, tensor
