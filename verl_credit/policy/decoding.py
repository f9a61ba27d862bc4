"""Attention of a batch that decodes: its masks, and one token per row without a copy of keys and values."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import causal_mask_function, sdpa_mask

from verl_credit.policy.families import why_not_decoded

_DECODE = "grouped_decode"


def _attention(
    module, query, key, value, attention_mask, dropout=0.0, scaling=None, softcap=None, s_aux=None, **kwargs
):
    """Treats heads that share keys and values as one head with more queries: [B, H, 1, D] -> [B, H_kv, H / H_kv, D].

    With a mask, transformers repeats keys and values for every query head, which copies the whole cache at each step. A
    single new token attends to everything that its mask admits, so its heads can be query positions. Several tokens go to
    plain sdpa. Neither knows a softcap (Gemma 2) or sinks (gpt-oss), which are computed here.
    """
    batch, heads, length, head_dim = query.shape
    groups = heads // key.shape[1]
    if softcap is not None or s_aux is not None:
        return _by_scores(query, key, value, attention_mask, scaling, softcap, s_aux), None
    if length != 1:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
    if attention_mask is not None and attention_mask.shape[1] == heads:
        attention_mask = attention_mask.reshape(batch, key.shape[1], groups, -1)
    output = torch.nn.functional.scaled_dot_product_attention(
        query.reshape(batch, key.shape[1], groups, head_dim),
        key,
        value,
        attn_mask=attention_mask,
        scale=scaling,
    )
    return output.reshape(batch, 1, heads, value.shape[-1]), None


def _by_scores(query, key, value, attention_mask, scaling, softcap, sink_H) -> torch.Tensor:
    """softmax(softcap * tanh(scores / softcap)), with one score more per head (the sink) that has no value."""
    batch, length = query.shape[0], query.shape[2]
    query = query.unflatten(1, (key.shape[1], -1))
    scores = (query @ key.unsqueeze(2).transpose(-1, -2) * scaling).flatten(1, 2)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if attention_mask is None:
        attention_mask = torch.ones(length, key.shape[2], dtype=torch.bool, device=key.device).tril()
    scores = scores.masked_fill(~attention_mask, torch.finfo(scores.dtype).min)
    if sink_H is not None:
        scores = torch.cat([scores, sink_H.view(1, -1, 1, 1).expand(batch, -1, length, 1)], dim=-1)
    weights = scores.softmax(dim=-1, dtype=torch.float32)[..., : key.shape[2]].to(value.dtype)
    output = weights.unflatten(1, (key.shape[1], -1)) @ value.unsqueeze(2)
    return output.flatten(1, 2).transpose(1, 2).contiguous()


def _mask(
    batch_size, q_length, kv_length, q_offset=0, mask_function=causal_mask_function, attention_mask=None,
    **kwargs,
):  # fmt: skip
    """The mask [B, 1, query, key] that a model's own `mask_function` gives between positions in a row.

    transformers' own function compares columns, between which there may be padding, and waits for the device.
    """
    if attention_mask is None:
        return sdpa_mask(batch_size, q_length, kv_length, q_offset, mask_function=mask_function, **kwargs)
    visible = attention_mask[:, None, None, :kv_length]
    if q_length == 1 and mask_function is causal_mask_function:
        return visible
    seen = attention_mask.cumsum(dim=1)
    # Padding in front counts, as it does in transformers' mask of chunks; every other mask depends on differences.
    position = seen - 1 + (seen == 0).sum(dim=1, keepdim=True)
    row = torch.arange(batch_size, device=position.device)[:, None, None, None]
    queries = position[:, None, q_offset : q_offset + q_length, None]
    return mask_function(row, torch.zeros_like(row), queries, position[:, None, None, :kv_length]) & visible


AttentionInterface.register(_DECODE, _attention)
AttentionMaskInterface.register(_DECODE, _mask)


def require_decodable(model: PreTrainedModel) -> None:
    """Raises ValueError for a model of a family that is not decoded, or with another attention than its own."""
    if why := why_not_decoded(model.config.to_dict()):
        raise ValueError(why)
    attention = model.config._attn_implementation
    if attention != "sdpa" and not (attention == "eager" and model._supports_attention_backend):
        through = "and 'eager' of a model that calls it through transformers' AttentionInterface"
        raise ValueError(
            f"the model's attn_implementation is {attention!r}: only 'sdpa' is supported, {through}"
        )


@contextmanager
def decoding(model: PreTrainedModel, attention: str = _DECODE) -> Iterator[None]:
    """Inside the block the model is in eval mode with this attention; both are restored afterwards."""
    before, training = model.config._attn_implementation, model.training
    model.config._attn_implementation = attention
    model.eval()
    try:
        yield
    finally:
        model.config._attn_implementation = before
        model.train(training)
