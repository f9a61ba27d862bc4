"""Gated-DeltaNet layers (Qwen3-Next, Qwen3.5, Qwen3.6) over packed rows, each row as if it were alone.

Such a layer has a causal convolution and a state that runs from token to token. transformers runs both over the borders of
packed rows (rows off by up to 4 nats), and verl's patch for Qwen3.5 splits the convolution alone. Here a layer that gets a
pack computes both per row: the rule over rows that are padded inside the layer, the convolution with zeros between rows.
The kernels of flash-linear-attention and causal-conv1d, where they are installed, get the borders of the rows instead; they
need a GPU and are untried here. There are no branches: they would need the state at their base.

The pack is a keyword of the layer's own forward, so that checkpointed layers have it again in the backward pass.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.nn.functional as F

from verl_credit.policy.attention.pack import PACK, Pack
from verl_credit.policy.families import DELTA_NET


def is_delta_net(config) -> bool:
    """Whether a model of this config has Gated-DeltaNet layers that `keep_rows_apart` knows."""
    return config.get_text_config().model_type in DELTA_NET


def keep_rows_apart(model: torch.nn.Module) -> None:
    """Each Gated-DeltaNet layer reads the rows of its pack apart; without a pack it computes what transformers computes.

    It comes before wrappers of the layers' forwards (FSDP, activation offloading).
    """
    for layer in model.modules():
        if hasattr(layer, "linear_attn"):
            layer.forward = partial(_forward, layer.forward, layer.linear_attn)


def _forward(forward: Callable, net: torch.nn.Module, *given, **named):
    pack = named.get(PACK)
    if pack is None:
        return forward(*given, **named)
    home, rule_name = _functions(net)
    rule, convolution = getattr(home, rule_name), home.causal_conv1d_fn
    setattr(home, rule_name, partial(packed_rule, rule, pack))
    home.causal_conv1d_fn = partial(packed_convolution, convolution if home is net else None, pack)
    try:
        return forward(*given, **named)
    finally:
        setattr(home, rule_name, rule)
        home.causal_conv1d_fn = convolution


def _functions(net: torch.nn.Module) -> tuple[object, str]:
    """(what has the layer's rule and convolution, the rule's name there): the layer; from transformers 5.15 on its module.

    A function of the module chooses its kernel when it is called. The rule is right with any, because its rows are padded,
    and the convolution is ours.
    """
    if hasattr(net, "chunk_gated_delta_rule"):
        return net, "chunk_gated_delta_rule"
    home = next(kind.__module__ for kind in type(net).__mro__ if kind.__module__.startswith("transformers."))
    return sys.modules[home], "torch_chunk_gated_delta_rule"


def packed_rule(rule: Callable, pack: Pack, query, key, value, *, g, beta, **options):
    """(output, None) of the gated delta rule, which begins with an empty state at every row. All tensors are [1, N, ...]."""
    device = query.device
    if not rule.__module__.startswith(
        "transformers."
    ):  # flash-linear-attention's kernel splits the stream itself
        starts = [*(row.start for row in pack.rows), pack.length]
        borders = pack.once(("borders", device), lambda: torch.tensor(starts, device=device))
        return rule(query, key, value, g=g, beta=beta, **{**options, "cu_seqlens": borders})
    tensors, result = (query, key, value, g, beta), torch.empty_like(value)
    for rows, longest, at_N, place_N in pack.once(("groups", device), lambda: list(_groups(pack, device))):
        padded = [
            x.new_zeros(rows * longest, *x.shape[2:])
            .index_copy(0, place_N, x[0, at_N])
            .unflatten(0, (rows, longest))
            for x in tensors
        ]
        output, _ = rule(*padded[:3], g=padded[3], beta=padded[4], **options)
        result = result.index_copy(1, at_N, output.flatten(0, 1)[None, place_N])
    return result, None


def packed_convolution(
    convolution: Callable | None, pack: Pack, x, weight, bias=None, activation=None, **options
):
    """silu of the causal convolution of x [1, C, N] with weight [C, K]; no row sees the one before."""
    pack.require("a Gated-DeltaNet layer", x.shape[0], x.shape[2])
    numbers = [torch.full((row.length,), n) for n, row in enumerate(pack.rows)]
    row_N = pack.once(("row", x.device), lambda: torch.cat(numbers).to(x.device))
    if convolution is not None:
        given = {"weight": weight, "bias": bias, "activation": activation, "seq_idx": row_N.int()[None]}
        return convolution(x=x, **given)
    zeros = weight.shape[-1] - 1
    at_N = torch.arange(pack.length, device=x.device) + row_N * zeros
    spaced = x.new_zeros(*x.shape[:2], pack.length + len(pack.rows) * zeros).index_copy(2, at_N + zeros, x)
    return F.silu(F.conv1d(spaced, weight[:, None], bias, groups=len(weight))[..., at_N])


def _groups(pack: Pack, device) -> Iterator[tuple[int, int, torch.Tensor, torch.Tensor]]:
    """Rows of similar length are padded together, so that one long row does not pad many short ones: at most twice the
    tokens. (rows, tokens of the longest, places in the stream, places in the padded rows) of each group."""
    for bits in sorted({row.length.bit_length() for row in pack.rows}):
        rows = [row for row in pack.rows if row.length.bit_length() == bits]
        longest = max(row.length for row in rows)
        at_N = torch.cat([torch.arange(row.start, row.start + row.length) for row in rows])
        place_N = torch.cat([number * longest + torch.arange(row.length) for number, row in enumerate(rows)])
        yield len(rows), longest, at_N.to(device), place_N.to(device)
