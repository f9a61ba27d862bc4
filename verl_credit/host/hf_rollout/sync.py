"""A step's weights on their way to the rollout server: packed as safetensors in the training worker, loaded in the server,
compared by checksum."""

import hashlib
import math
import os
from collections.abc import AsyncIterable, AsyncIterator, Iterable

import ray
import torch
from safetensors.torch import load, save
from verl.utils.torch_dtypes import PrecisionType
from verl.workers.rollout.base import BaseRollout
from verl.workers.rollout.utils import ensure_async_iterator

Weights = Iterable[tuple[str, torch.Tensor]] | AsyncIterable[tuple[str, torch.Tensor]]


class WeightError(RuntimeError):
    """The rollout model's weights differ from those of the trained model."""


def tensor_digest(tensor: torch.Tensor) -> str:
    """SHA-256 over dtype, shape and the raw bytes."""
    plain = tensor.detach().cpu().contiguous()
    digest = hashlib.sha256(f"{plain.dtype} {tuple(plain.shape)} ".encode())
    digest.update(plain.reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


def checksum(digests: dict[str, str]) -> str:
    """SHA-256 over names and tensor digests, sorted by name."""
    lines = "\n".join(f"{name} {digest}" for name, digest in sorted(digests.items()))
    return hashlib.sha256(lines.encode()).hexdigest()


async def weight_buckets(
    weights: Weights, digests: dict[str, str], *, dtype: torch.dtype | None, bucket_bytes: int
) -> AsyncIterator[bytes]:
    """Safetensors documents of about `bucket_bytes`; floating tensors are cast to `dtype` first (None: they keep their own).
    ``digests`` gets the digest of each tensor. Raises WeightError when a name comes twice."""
    bucket: dict[str, torch.Tensor] = {}
    async for name, tensor in ensure_async_iterator(weights):
        if name in digests:
            raise WeightError(f"weight {name!r} was sent twice in one update")
        # A copy, because the source may reuse the storage, and safetensors refuses shared storage.
        own = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
        bucket[name] = plain = tensor.detach().to(device="cpu", dtype=own, copy=True).contiguous()
        digests[name] = tensor_digest(plain)
        if sum(one.nbytes for one in bucket.values()) >= bucket_bytes:
            yield save(bucket)
            bucket = {}
    if bucket:
        yield save(bucket)


class WeightSink:
    """Updates a model's parameters and persistent buffers once, in place.

    An unknown name, a wrong shape or dtype, and (at the end) a missing name are errors. Names that share a tensor, such as a
    tied `lm_head.weight` and the embedding, count as one: any of them suffices.
    """

    def __init__(self, model: torch.nn.Module):
        self._state = model.state_dict(keep_vars=True)
        self._received: set[str] = set()

    @torch.no_grad()
    def load(self, bucket: bytes) -> None:
        """Copy one bucket into the model."""
        for name, tensor in load(bucket).items():
            if name not in self._state:
                raise WeightError(f"unexpected weight {name!r}: the rollout model has no tensor of this name")
            target = self._state[name]
            if (target.shape, target.dtype) != (tensor.shape, tensor.dtype):
                is_, needs = (f"{one.dtype} {tuple(one.shape)}" for one in (tensor, target))
                raise WeightError(f"weight {name!r} is {is_}: the rollout model needs {needs}")
            target.copy_(tensor)
            self._received.add(name)

    def finish(self) -> str:
        """Checksum of the received names, read back from the model; raises WeightError if one is missing."""
        arrived = {self._state[name].data_ptr() for name in self._received}
        missing = [name for name, t in self._state.items() if t.numel() and t.data_ptr() not in arrived]
        if missing:
            raise WeightError(f"{len(missing)} weights did not arrive, among them {missing[:5]}")
        return checksum({name: tensor_digest(self._state[name]) for name in self._received})


def server_name(replica_rank: int, kind: str = "", suffix: str = "") -> str:
    """The name under which Ray finds the server of a replica."""
    return f"hf_server_{kind}{replica_rank}{suffix}"


class ServerAdapter(BaseRollout):
    """Rank 0 of each replica sends; the other ranks exhaust the generator, because each of its steps is a collective."""

    def __init__(self, config, model_config, device_mesh, replica_rank: int = -1):
        super().__init__(config, model_config, device_mesh)
        kinds = ("tensor_model", "data", "pipeline_model")
        ranks = math.prod(getattr(self.config, f"{kind}_parallel_size") for kind in kinds)
        replica, place = divmod(int(os.environ["RANK"]), ranks)
        self.replica_rank = replica if replica_rank == -1 else replica_rank
        self.is_leader_rank = place == 0
        self._server: ray.actor.ActorHandle | None = None

    async def resume(self, tags: list[str] | None = None) -> None:
        """Nothing to do: a weight update wakes the server itself, and no cache outlives a batch."""

    release = resume

    @torch.no_grad()
    async def update_weights(
        self,
        weights: Weights,
        global_steps: int | None = None,
        wire_format: str = "named_tensors",
        peft_config: dict | None = None,
        **unused: object,
    ) -> None:
        """Send all weights in buckets; raises WeightError unless the server's checksum equals ours."""
        if wire_format != "named_tensors" or peft_config is not None:
            given = f"wire_format={wire_format!r}, LoRA={peft_config is not None}"
            raise NotImplementedError(f"rollout.name=hf takes full weights only: {given}")
        if not self.is_leader_rank:
            async for _ in ensure_async_iterator(weights):
                pass
            return
        bucket_bytes = self.config.checkpoint_engine.update_weights_bucket_megabytes << 20
        dtype, digests = PrecisionType.to_dtype(self.config.dtype), {}
        if self._server is None:  # looked up late: the server starts after the training workers
            self._server = ray.get_actor(server_name(self.replica_rank))
        server = self._server
        await server.begin_weight_update.remote()
        async for bucket in weight_buckets(weights, digests, dtype=dtype, bucket_bytes=bucket_bytes):
            await server.load_weight_bucket.remote(bucket)
        sent, loaded = checksum(digests), await server.finish_weight_update.remote(global_steps)
        if sent != loaded:
            raise WeightError(
                f"weights arrived damaged: sent checksum {sent}, the rollout server holds {loaded}"
            )
