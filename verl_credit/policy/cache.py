"""What a batch of rows has read: keys and values that append in place, and recurrent states as transformers keeps them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import PreTrainedConfig
from transformers.cache_utils import (
    Cache,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionLayer,
)

_SPARE_TOKENS = 64  # spare length of a cache, so that an append rarely has to copy all of it


class _GrowingLayer(DynamicLayer):
    """Stores a layer's keys and values [B, heads, length, head_dim] as views of a longer buffer.

    transformers' own dynamic layer concatenates at every step, which copies the whole cache for each new token. A layer
    with a sliding window keeps all tokens too: the mask has the window, whatever padding lies inside it.
    """

    def __init__(self, most: int | None) -> None:
        super().__init__()
        self.length, self._most = 0, most
        self._buffers: list[torch.Tensor] = []

    def update(self, key_states, value_states, *args, **kwargs):
        start, self.length = self.length, self.length + key_states.shape[-2]
        new = (key_states, value_states)
        if not self._buffers or self._buffers[0].shape[2] < self.length:
            self._buffers = [self._longer(states) for states in new]
            if start:
                for longer, states in zip(self._buffers, (self.keys, self.values), strict=True):
                    longer[:, :, :start] = states
        for buffer, states in zip(self._buffers, new, strict=True):
            buffer[:, :, start : self.length] = states
        self.is_initialized = True
        return self._show()

    def _longer(self, states: torch.Tensor) -> torch.Tensor:
        batch, heads, _, head_dim = states.shape
        length = self.length + max(_SPARE_TOKENS, self.length // 4)
        return states.new_empty(batch, heads, min(length, self._most or length), head_dim)

    def _show(self) -> tuple[torch.Tensor, torch.Tensor]:
        self.keys, self.values = (buffer[:, :, : self.length] for buffer in self._buffers)
        return self.keys, self.values

    def get_seq_length(self) -> int:
        return self.length

    def reorder_cache(self, rows: torch.Tensor) -> None:
        if self._buffers:
            self._buffers = [buffer.index_select(0, rows) for buffer in self._buffers]
            self._show()

    def join(self, others: Sequence[_GrowingLayer]) -> None:
        if others[0].length:
            width = max(layer.length for layer in others)
            keys = torch.cat([_on_the_right(layer.keys, width) for layer in others])
            self.update(keys, torch.cat([_on_the_right(layer.values, width) for layer in others]))


class _StateLayer(LinearAttentionLayer):
    def join(self, others: Sequence[_StateLayer]) -> None:
        for kind in ("conv", "recurrent"):
            update = getattr(self, f"update_{kind}_state")
            states = [getattr(layer, f"{kind}_states") for layer in others]
            if isinstance(states[0], dict):  # by number, from transformers 5.15 on
                for number, first in states[0].items():
                    if first is not None:
                        update(torch.cat([state[number] for state in states]), state_idx=number)
            elif states[0] is not None:
                update(torch.cat(states))


def _on_the_right(tokens: torch.Tensor, width: int) -> torch.Tensor:
    """Zeros and not garbage on the left, because a mask turns infinity into NaN."""
    return torch.nn.functional.pad(tokens, (0, 0, width - tokens.shape[2], 0))


class RowCache(Cache):
    """The cache of a batch of rows, with the kinds of layers that `config` gives.

    `most`: tokens of the longest row, beyond which no memory is taken.
    """

    def __init__(self, config: PreTrainedConfig, most: int | None = None):
        kinds = [type(layer) for layer in DynamicCache(config=config).layers]
        # transformers gives no layers at all where num_kv_shared_layers is 0.
        kinds = kinds or [DynamicLayer] * config.get_text_config().num_hidden_layers
        super().__init__(layers=[_layer(kind, most) for kind in kinds])

    @property
    def recurrent(self) -> bool:
        """Whether a layer has a state that padding would enter."""
        return any(isinstance(layer, _StateLayer) for layer in self.layers)

    def join(self, others: Sequence[RowCache]) -> None:
        """An empty cache gets the rows of all `others`, one after another, with padding on the left of their keys."""
        for number, layer in enumerate(self.layers):
            layer.join([other.layers[number] for other in others])


def _layer(kind: type, most: int | None) -> Cache:
    if kind in (DynamicLayer, DynamicSlidingWindowLayer):
        return _GrowingLayer(most)
    if kind is LinearAttentionLayer:
        return _StateLayer()
    use = "use actor_rollout_ref.rollout.name=vllm"
    raise ValueError(f"hf cannot decode a model with cache layers of the kind {kind.__name__}; {use}")
