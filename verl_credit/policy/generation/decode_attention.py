"""Attention for decoding one token per row, without copying grouped key-value heads."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

_NAME = "sdpa_grouped_decode"


def _grouped_decode(module, query, key, value, attention_mask, dropout=0.0, scaling=None, **kwargs):
    """Treats heads that share keys and values as query positions of one head; other lengths go to plain sdpa.

    With a mask, transformers repeats keys and values for every query head, which copies the whole cache at each step. A
    single new token sees everything that its mask admits, so its heads can be query positions instead: query
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


AttentionInterface.register(_NAME, _grouped_decode)
AttentionMaskInterface.register(_NAME, sdpa_mask)


@contextmanager
def grouped_decode_attention(model: PreTrainedModel) -> Iterator[None]:
    """Inside the block a model on sdpa decodes without copies; its configuration is restored afterwards."""
    before = model.config._attn_implementation
    model.config._attn_implementation = _NAME
    try:
        yield
    finally:
        model.config._attn_implementation = before
