"""A key-value cache that appends in place and drops finished rows."""

import torch
from transformers.cache_utils import Cache, DynamicLayer

# Spare length in tokens, so that an append rarely has to copy the whole cache.
_SPARE_TOKENS = 64


class _GrowingLayer(DynamicLayer):
    """One layer's keys and values [B, heads, length, head_dim] as views of a longer buffer.

    transformers' own dynamic layer concatenates at every step, which copies the whole cache for each new token.
    """

    def __init__(self) -> None:
        super().__init__()
        self.length = 0
        self._keys: torch.Tensor | None = None
        self._values: torch.Tensor | None = None

    def update(self, key_states, value_states, *args, **kwargs):
        start, self.length = self.length, self.length + key_states.shape[-2]
        self._keys = _grown(self._keys, key_states, start, self.length)
        self._values = _grown(self._values, value_states, start, self.length)
        self._keys[:, :, start : self.length] = key_states
        self._values[:, :, start : self.length] = value_states
        self.is_initialized = True
        self.keys, self.values = self._keys[:, :, : self.length], self._values[:, :, : self.length]
        return self.keys, self.values

    def get_seq_length(self) -> int:
        return self.length

    def select_rows(self, keep: torch.Tensor) -> None:
        self._keys, self._values = self._keys.index_select(0, keep), self._values.index_select(0, keep)
        self.keys, self.values = self._keys[:, :, : self.length], self._values[:, :, : self.length]


def _grown(buffer: torch.Tensor | None, new: torch.Tensor, used: int, needed: int) -> torch.Tensor:
    if buffer is not None and buffer.shape[2] >= needed:
        return buffer
    batch, heads, _, head_dim = new.shape
    larger = new.new_empty(batch, heads, needed + max(_SPARE_TOKENS, needed // 4), head_dim)
    if buffer is not None:
        larger[:, :, :used] = buffer[:, :, :used]
    return larger


class GrowingCache(Cache):
    """A cache of `num_layers` full-attention layers; `select_rows` keeps the given batch rows."""

    def __init__(self, num_layers: int):
        super().__init__(layers=[_GrowingLayer() for _ in range(num_layers)])

    def select_rows(self, keep: torch.Tensor) -> None:
        for layer in self.layers:
            layer.select_rows(keep)
