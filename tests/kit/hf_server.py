"""A rollout server of `rollout.name=hf` as after its start, without Ray and verl, and a weight update of it."""

from __future__ import annotations

import torch

from verl_credit.host.hf_rollout.batcher import RequestBatcher
from verl_credit.host.hf_rollout.server import HFServer
from verl_credit.host.hf_rollout.sync import checksum, weight_buckets
from verl_credit.policy.generation import BatchGenerator


def server_of(model) -> HFServer:
    server = object.__new__(HFServer)
    server._max_model_len = model.config.get_text_config().max_position_embeddings
    server._model, server._why_not_ready, server.global_steps = model, None, None
    server._generator = BatchGenerator(model, pad_token_id=0)
    server._batcher = RequestBatcher(server._generate, max_batch_size=8, quiet_seconds=0)
    return server


async def update(server: HFServer, trained: torch.nn.Module) -> None:
    digests, weights = {}, trained.state_dict().items()
    await server.begin_weight_update()
    async for bucket in weight_buckets(weights, digests, dtype=torch.float32, bucket_bytes=2000):
        await server.load_weight_bucket(bucket)
    assert await server.finish_weight_update(1) == checksum(digests)
