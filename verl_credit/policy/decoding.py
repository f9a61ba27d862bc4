"""Decoding of one token per row without copies: attention for grouped heads, and a cache that appends in place."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.cache_utils import Cache, DynamicLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

_DECODE = "sdpa_grouped_decode"
_SPARE_TOKENS = 64  # spare length of a cache, so that an append rarely has to copy all of it


def _grouped_decode(module, query, key, value, attention_mask, dropout=0.0, scaling=None, **kwargs):
    """Treats heads that share keys and values as query positions of one head; other lengths go to plain sdpa.

    With a mask, transformers repeats keys and values for every query head, which copies the whole cache at each step. A
    single new token attends to everything that its mask admits, so its heads can be query positions instead: query
    [B, H, 1, D] -> [B, H_kv, H / H_kv, D].
    """
    batch, heads, length, head_dim = query.shape
    if length != 1:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
    folded = query.reshape(batch, key.shape[1], heads // key.shape[1], head_dim)
    output = torch.nn.functional.scaled_dot_product_attention(
        folded, key, value, attn_mask=attention_mask, scale=scaling
    )
    return output.reshape(batch, 1, heads, head_dim), None


AttentionInterface.register(_DECODE, _grouped_decode)
AttentionMaskInterface.register(_DECODE, sdpa_mask)


@contextmanager
def grouped_decode_attention(model: PreTrainedModel) -> Iterator[None]:
    """Inside the block a model on sdpa decodes without copies; its configuration is restored afterwards."""
    before = model.config._attn_implementation
    model.config._attn_implementation = _DECODE
    try:
        yield
    finally:
        model.config._attn_implementation = before


class _GrowingLayer(DynamicLayer):
    """Stores a layer's keys and values [B, heads, length, head_dim] as views of a longer buffer.

    transformers' own dynamic layer concatenates at every step, which copies the whole cache for each new token.
    """

    def __init__(self, most: int | None) -> None:
        super().__init__()
        self.length, self._most = 0, most
        self._keys: torch.Tensor | None = None
        self._values: torch.Tensor | None = None

    def update(self, key_states, value_states, *args, **kwargs):
        start, self.length = self.length, self.length + key_states.shape[-2]
        self._keys = _grown(self._keys, key_states, start, self.length, self._most)
        self._values = _grown(self._values, value_states, start, self.length, self._most)
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


def _grown(
    buffer: torch.Tensor | None, new: torch.Tensor, used: int, needed: int, most: int | None
) -> torch.Tensor:
    if buffer is not None and buffer.shape[2] >= needed:
        return buffer
    batch, heads, _, head_dim = new.shape
    length = needed + max(_SPARE_TOKENS, needed // 4)
    larger = new.new_empty(batch, heads, length if most is None else min(length, most), head_dim)
    if buffer is not None:
        larger[:, :, :used] = buffer[:, :, :used]
    return larger


class GrowingCache(Cache):
    """A cache of `num_layers` full-attention layers; `select_rows` keeps the given batch rows.

    `most`: tokens of the longest row, beyond which no memory is taken.
    """

    def __init__(self, num_layers: int, most: int | None = None):
        super().__init__(layers=[_GrowingLayer(most) for _ in range(num_layers)])

    def select_rows(self, keep: torch.Tensor) -> None:
        for layer in self.layers:
            layer.select_rows(keep)
