"""torch's FlexAttention over rows and branches, compiled where there is an accelerator."""

from __future__ import annotations

from functools import cache

import torch

from verl_credit.policy.attention.pack import Pack

BLOCK = 128
LIMIT = 32
"""Compilations per function below. A run needs two of each: for one block of tokens, and for several."""
BACKENDS: dict[str, str | None] = {"cpu": None}
"""The compiler by kind of device, by default inductor; None runs uncompiled."""

INSTEAD = "uncompiled it would hold all scores; use attn_implementation=credit_sdpa"


def flex(query, key, value, pack: Pack, *, scaling, window=None, softcap=None, dropout=0.0) -> torch.Tensor:
    """FlexAttention with a block mask. Errors: RuntimeError when it should be compiled but would run uncompiled."""
    from torch._dynamo.exc import FailOnRecompileLimitHit
    from torch.fx.experimental import _config as shapes

    if dropout:
        raise ValueError(f"attention dropout of {dropout}: FlexAttention has none; set attention_dropout=0")
    mask = pack.once(("block", window, query.device), lambda: block_mask(pack, window, query.device))
    purpose = "training" if torch.is_grad_enabled() else "forward"
    backend = BACKENDS.get(query.device.type, "inductor")
    attend = function_for(purpose, backend, scaling, softcap, query.shape[1] > key.shape[1])
    # Scaling and softcap are constants; and equal sizes, such as 32 heads and 32 blocks, are distinguished: if Dynamo took
    # them for one size, it would compile again for the next length.
    limit = torch._dynamo.config.patch(recompile_limit=LIMIT, specialize_float=True)
    try:
        with limit, shapes.patch(use_duck_shape=False):
            out = attend(query, key, value, mask)
    except FailOnRecompileLimitHit as failure:
        again = (
            f"was compiled {LIMIT} times, and would be once more for {tuple(query.shape)} in {query.dtype}"
        )
        raise RuntimeError(f"FlexAttention ({purpose}) {again}; {INSTEAD}") from failure
    return out.transpose(1, 2).contiguous()


@cache
def function_for(purpose: str, backend: str | None, scaling: float, softcap: float | None, gqa: bool):
    """A function with its own code object, because Dynamo counts compilations, with a limit, per code object. Numbers are
    constants in it; sizes are not."""
    from torch.nn.attention.flex_attention import flex_attention

    def capped(score, b, h, q, k):
        return softcap * torch.tanh(score / softcap)

    def attend(query, key, value, mask):
        if backend is not None and not torch.compiler.is_compiling():
            why = "should be compiled but runs uncompiled: is TORCHDYNAMO_DISABLE or suppress_errors set?"
            raise RuntimeError(f"FlexAttention ({purpose}) {why} {INSTEAD}")
        # One kernel for all lengths: below 128 queries torch would use another one, which long packs do not test.
        options = {"FORCE_USE_FLEX_ATTENTION": True}
        score_mod = None if softcap is None else capped
        return flex_attention(
            query, key, value, score_mod, mask, scaling, enable_gqa=gqa, kernel_options=options
        )

    attend.__code__ = attend.__code__.replace(co_name=f"flex_attention_for_{purpose}")
    if backend is None:
        return attend
    return torch.compile(attend, backend=backend, dynamic=True, fullgraph=True)


def block_mask(pack: Pack, window: int | None, device):
    """The block mask, computed from ranges, without the mask of all pairs of tokens and without a compiler."""
    from torch.nn.attention.flex_attention import BlockMask

    reach = pack.reach(window, device)
    seen_BB = torch.cat([_seen(reach, first, pack.length) for first in range(0, pack.length, 64 * BLOCK)])
    whole_BB = seen_BB == BLOCK * BLOCK
    tables = []  # per block of queries: the number of blocks of keys, and all blocks with these first
    for blocks_BB in ((seen_BB > 0) & ~whole_BB, whole_BB):
        order_BB = blocks_BB.int().argsort(dim=-1, descending=True, stable=True)
        tables += [blocks_BB.sum(dim=-1).int()[None, None], order_BB.int()[None, None]]

    def sees(b, h, query, key):
        return reach.sees(query, key)

    return BlockMask.from_kv_blocks(
        *tables, BLOCK_SIZE=BLOCK, mask_mod=sees, seq_lengths=(pack.length, pack.length)
    )


def _seen(reach, first: int, length: int) -> torch.Tensor:
    """Visible pairs per block: [at most 64 blocks of queries from place ``first`` on, blocks of keys]."""
    last = min(first + 64 * BLOCK, length)
    place_Q = torch.arange(first, last, device=reach.own_N.device)
    block_K = torch.arange(0, length, BLOCK, device=reach.own_N.device)

    def within(start_Q, end_Q):
        end_QK = torch.minimum(end_Q[:, None], block_K + BLOCK)
        return (end_QK - torch.maximum(start_Q[:, None], block_K)).clamp(min=0)

    here = slice(first, last)
    pairs = within(reach.own_N[here], place_Q + 1) + within(reach.trunk_N[here], reach.end_N[here])
    pairs = torch.nn.functional.pad(pairs, (0, 0, 0, -len(pairs) % BLOCK))
    return pairs.unflatten(0, (-1, BLOCK)).sum(dim=1)
