"""The training worker's side of the rollout: sends each step's weights to the server and checks them."""

import os
from collections.abc import AsyncIterable, Iterable

import ray
import torch
from verl.utils.torch_dtypes import PrecisionType
from verl.workers.rollout.base import BaseRollout
from verl.workers.rollout.utils import ensure_async_iterator

from verl_credit.host.hf_rollout.replica import server_name
from verl_credit.host.hf_rollout.weights import WeightError, WeightSource


class ServerAdapter(BaseRollout):
    """Rank 0 of each replica sends; the other ranks exhaust the generator, because each of its steps is a collective."""

    def __init__(self, config, model_config, device_mesh, replica_rank: int = -1):
        super().__init__(config, model_config, device_mesh)
        ranks = (
            self.config.tensor_model_parallel_size
            * self.config.data_parallel_size
            * self.config.pipeline_model_parallel_size
        )
        rank = int(os.environ["RANK"])
        self.replica_rank = rank // ranks if replica_rank == -1 else replica_rank
        self.is_leader_rank = rank % ranks == 0
        self._server: ray.actor.ActorHandle | None = None

    def _server_handle(self) -> ray.actor.ActorHandle:
        # Looked up late: the server starts after the training workers.
        if self._server is None:
            self._server = ray.get_actor(server_name(self.replica_rank))
        return self._server

    async def resume(self, tags: list[str]) -> None:
        """Nothing to do: the server keeps its weights, and no cache outlives a batch."""

    async def release(self) -> None:
        """Nothing to do, see `resume`."""

    @torch.no_grad()
    async def update_weights(
        self,
        weights: Iterable[tuple[str, torch.Tensor]] | AsyncIterable[tuple[str, torch.Tensor]],
        global_steps: int | None = None,
        wire_format: str = "named_tensors",
        peft_config: dict | None = None,
        **unused: object,
    ) -> None:
        """Send all weights in buckets; raises WeightError unless the server's checksum equals ours."""
        if wire_format != "named_tensors" or peft_config is not None:
            raise NotImplementedError(
                "rollout.name=hf takes full weights only: "
                f"wire_format={wire_format!r}, LoRA={peft_config is not None}"
            )
        if not self.is_leader_rank:
            async for _ in ensure_async_iterator(weights):
                pass
            return
        bucket_bytes = self.config.checkpoint_engine.update_weights_bucket_megabytes << 20
        source = WeightSource(dtype=PrecisionType.to_dtype(self.config.dtype), bucket_bytes=bucket_bytes)
        server = self._server_handle()
        await server.begin_weight_update.remote()
        async for name, tensor in ensure_async_iterator(weights):
            if (full := source.add(name, tensor)) is not None:
                await server.load_weight_bucket.remote(full)
        if (rest := source.rest()) is not None:
            await server.load_weight_bucket.remote(rest)
        compare(sent=source.checksum(), loaded=await server.finish_weight_update.remote(global_steps))


def compare(*, sent: str, loaded: str) -> None:
    """Raises WeightError when the server does not hold what was sent."""
    if sent != loaded:
        raise WeightError(
            f"weight update arrived damaged: sent checksum {sent}, the rollout server holds {loaded}"
        )
