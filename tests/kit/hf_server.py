"""A rollout server of `rollout.name=hf` as after its start, without Ray and verl, and a weight update of it."""

from __future__ import annotations

from math import inf
from types import SimpleNamespace

import torch
from verl.workers.rollout.replica import RolloutMode

from verl_credit.host.hf_rollout.batcher import RequestBatcher
from verl_credit.host.hf_rollout.server import HFServer
from verl_credit.host.hf_rollout.sync import checksum, weight_buckets
from verl_credit.policy.generation import BatchGenerator


def server_of(model, *, device="cpu", mode=RolloutMode.HYBRID, free=True) -> HFServer:
    """On a device that this machine lacks the tensors stay where they are."""
    server = object.__new__(HFServer)
    server.config = SimpleNamespace(free_cache_engine=free, gpu_memory_utilization=0.5)
    server._device, server._mode, server._max_tokens = torch.device(device), mode, inf
    server._max_model_len = model.config.get_text_config().max_position_embeddings
    server._model, server._come_back, server._why_not_ready, server.global_steps = model, None, None, None
    server._generator = BatchGenerator(model, pad_token_id=0)
    server._batcher = RequestBatcher(server._generate, max_batch_size=8, quiet_seconds=0)
    return server


async def update(server: HFServer, trained: torch.nn.Module) -> None:
    digests, weights = {}, trained.state_dict().items()
    await server.begin_weight_update()
    async for bucket in weight_buckets(weights, digests, dtype=torch.float32, bucket_bytes=2000):
        await server.load_weight_bucket(bucket)
    assert await server.finish_weight_update(1) == checksum(digests)
