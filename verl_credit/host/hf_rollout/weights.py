"""Moves weights into a model and checks that they arrived: safetensors buckets, strict names, checksums."""

import hashlib
from collections.abc import Iterable, Iterator

import torch
from safetensors.torch import load, save


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


class WeightSource:
    """Packs named tensors into safetensors buckets and keeps their checksum. ``dtype`` None: they keep their own."""

    def __init__(self, *, dtype: torch.dtype | None, bucket_bytes: int):
        self._dtype, self._bucket_bytes = dtype, bucket_bytes
        self._digests: dict[str, str] = {}
        self._bucket: dict[str, torch.Tensor] = {}

    def buckets(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[bytes]:
        """Safetensors documents of about `bucket_bytes`; floating tensors are cast to `dtype` first.

        Raises WeightError when a name comes twice.
        """
        for name, tensor in weights:
            if (full := self.add(name, tensor)) is not None:
                yield full
        if (rest := self.rest()) is not None:
            yield rest

    def add(self, name: str, tensor: torch.Tensor) -> bytes | None:
        """The document that this tensor fills, if it does. Raises WeightError when a name comes twice."""
        if name in self._digests:
            raise WeightError(f"weight {name!r} was sent twice in one update")
        # A copy, because the source may reuse the storage, and safetensors refuses shared storage.
        dtype = self._dtype if self._dtype is not None and tensor.is_floating_point() else tensor.dtype
        plain = tensor.detach().to(device="cpu", dtype=dtype, copy=True).contiguous()
        self._digests[name] = tensor_digest(plain)
        self._bucket[name] = plain
        held = sum(one.nbytes for one in self._bucket.values())
        return self.rest() if held >= self._bucket_bytes else None

    def rest(self) -> bytes | None:
        """The document that is not full."""
        bucket, self._bucket = self._bucket, {}
        return save(bucket) if bucket else None

    def checksum(self) -> str:
        """Checksum of everything packed so far."""
        return checksum(self._digests)


class WeightSink:
    """One update of a model's parameters and persistent buffers, in place.

    Strict: an unknown name, a wrong shape or dtype, and (at the end) a missing name are errors. Names that
    share a tensor, such as a tied `lm_head.weight` and the embedding, count as one: any of them suffices.
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
                raise WeightError(
                    f"weight {name!r} is {tensor.dtype} {tuple(tensor.shape)}: "
                    f"the rollout model needs {target.dtype} {tuple(target.shape)}"
                )
            target.copy_(tensor)
            self._received.add(name)

    def finish(self) -> str:
        """Checksum of the received names, read back from the model; raises WeightError if one is missing."""
        arrived = {self._state[name].data_ptr() for name in self._received}
        missing = [name for name, t in self._state.items() if t.numel() and t.data_ptr() not in arrived]
        if missing:
            raise WeightError(f"{len(missing)} weights did not arrive, among them {missing[:5]}")
        return checksum({name: tensor_digest(self._state[name]) for name in self._received})
