"""The policy's hidden states at chosen tokens, read from a forward that is made anyway.

A span is (first token, token after the last one) of a row; its state is the mean over its tokens. The state of one token is
the span of that token.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


@contextmanager
def hidden_states(model: nn.Module, layer: int = -1) -> Iterator[list[torch.Tensor]]:
    """The list gets the hidden states [1, tokens, D] of every forward of ``model`` inside the block.

    ``layer``: as transformers counts from the end; -1 are the states after the last norm, which `lm_head` reads.
    ``model``: a causal language model of transformers, also below peft or FSDP. The hook copies nothing. ValueError: the
    model has no such layer.
    """
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    body, read = getattr(inner, inner.base_model_prefix), []
    if layer < -1 and -layer > len(body.layers):
        expected = f"expected -{len(body.layers)} to -1, the policy's layers"
        raise ValueError(f"algorithm.turn_anchor_layer={layer}: {expected}")
    place = body if layer == -1 else body.layers[layer]
    hook = place.register_forward_hook(
        lambda module, given, output: read.append(output if isinstance(output, torch.Tensor) else output[0])
    )
    try:
        yield read
    finally:
        hook.remove()


def span_means(
    hidden_N_D: torch.Tensor,
    first_P: torch.Tensor,
    tokens_P: torch.Tensor,
    place_M: torch.Tensor | None = None,
) -> torch.Tensor:
    """[P, D] means over spans, added in float32, in the dtype of ``hidden_N_D``.

    ``first_P``, ``tokens_P``: each span's first token and number of tokens, at least 1, in the rows that follow each other.
    ``place_M``: the places of these tokens in ``hidden_N_D``; None: they stand there in this order.
    """
    span_M = torch.repeat_interleave(tokens_P)
    before_P = tokens_P.cumsum(0) - tokens_P
    token_M = torch.arange(len(span_M), device=span_M.device) + (first_P - before_P)[span_M]
    chosen_M_D = hidden_N_D[token_M if place_M is None else place_M[token_M]]
    sum_P_D = torch.zeros(len(tokens_P), hidden_N_D.shape[1], device=hidden_N_D.device)
    sum_P_D.index_add_(0, span_M, chosen_M_D.float())
    return (sum_P_D / tokens_P[:, None]).to(hidden_N_D.dtype)
