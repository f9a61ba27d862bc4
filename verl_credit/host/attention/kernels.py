"""Attention over a packed stream of rows and branches, three ways. The only place that knows flash-attn.

All compute the same: a token sees the tokens of its own segment up to itself, and, in a branch, the first ``base``
tokens of its row's trunk; of these, with a sliding window, those fewer than ``window`` positions back.
Shapes: query [1, heads, N, D], key and value [1, kv heads, N, D]; the result is [1, N, heads, D].
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch.nn.functional import scaled_dot_product_attention

from verl_credit.host.attention.pack import Pack, PackedRow


def sdpa(query, key, value, pack: Pack, *, scaling, window=None, softcap=None, dropout=0.0) -> torch.Tensor:
    """Two calls a row: its trunk, causal; its branches together, against the whole row under a mask."""
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    parts = []
    for row in pack.rows:
        end = row.start + row.trunk
        trunk = slice(row.start, end)
        mask = pack.trunk_mask(row, window, query.device)
        q, k, v = query[:, :, trunk], key[:, :, trunk], value[:, :, trunk]
        parts.append(_attend(q, k, v, mask, scaling, softcap, dropout))
        if row.branches:
            whole = slice(row.start, row.start + row.length)
            mask = pack.branch_mask(row, window, query.device)
            q = query[:, :, end : whole.stop]
            parts.append(_attend(q, key[:, :, whole], value[:, :, whole], mask, scaling, softcap, dropout))
    return torch.cat(parts, dim=2).transpose(1, 2).contiguous()


def _attend(q, k, v, mask, scaling, softcap, dropout) -> torch.Tensor:
    """``mask`` None: causal. SDPA knows no softcap: there the scores are computed in plain sight."""
    if softcap is None:
        return scaled_dot_product_attention(
            q, k, v, attn_mask=mask, dropout_p=dropout, scale=scaling, is_causal=mask is None
        )
    if mask is None:
        mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril()
    scores = softcap * torch.tanh(q @ k.transpose(2, 3) * scaling / softcap)
    scores = scores.masked_fill(~mask, -torch.inf)
    weights = scores.to(torch.promote_types(scores.dtype, torch.float32)).softmax(dim=-1).to(v.dtype)
    return torch.dropout(weights, dropout, dropout > 0) @ v


def flash(
    query, key, value, pack: Pack, *, scaling, window=None, softcap=None, dropout=0.0, varlen=None
) -> torch.Tensor:
    """Two varlen calls: every row as one causal sequence (right for trunks), then the branches against gathered keys."""
    varlen = varlen or flash_varlen()
    tables = pack.flash_tables(query.device)
    q, k, v = (tensor[0].transpose(0, 1).contiguous() for tensor in (query, key, value))
    options = {"dropout_p": dropout, "softmax_scale": scaling, "causal": True}
    if window is not None:
        options["window_size"] = (window - 1, 0)
    if softcap is not None:
        options["softcap"] = softcap
    cu, longest = tables.cu_rows, tables.longest_row
    out = varlen(q, k, v, cu, cu, longest, longest, **options)
    if len(tables.branch_N):
        branches = varlen(
            q[tables.branch_N], k[tables.key_N], v[tables.key_N], tables.cu_branches, tables.cu_keys,
            tables.longest_branch, tables.longest_keys, **options,
        )  # fmt: skip
        out = out.index_copy(0, tables.branch_N, branches)
    return out[None]


def flash_varlen():
    from flash_attn import flash_attn_varlen_func

    return flash_attn_varlen_func


def flex(query, key, value, pack: Pack, *, scaling, window=None, softcap=None, dropout=0.0) -> torch.Tensor:
    """FlexAttention with a block mask, compiled where there is an accelerator."""
    if dropout:
        raise ValueError(f"attention dropout of {dropout}: FlexAttention has none; set attention_dropout=0")
    attend, block_mask = _flex_parts(query.device.type)
    mask = pack._once(("block", window, query.device), lambda: block_mask(pack, window, query.device))
    score_mod = None
    if softcap is not None:

        def score_mod(score, b, h, q, k):
            return softcap * torch.tanh(score / softcap)

    groups = query.shape[1] // key.shape[1]
    out = attend(
        query, key, value, score_mod=score_mod, block_mask=mask, scale=scaling, enable_gqa=groups > 1
    )
    return out.transpose(1, 2).contiguous()


@lru_cache
def _flex_parts(device_type: str):
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    def block_mask(pack: Pack, window: int | None, device):
        segment_N, row_N, base_N = pack.row_and_base(device)
        position_N = pack.position_ids().to(device)

        def seen(b, h, q, k):
            own = (segment_N[q] == segment_N[k]) & (k <= q)
            trunk = (row_N[q] <= k) & (k < row_N[q] + base_N[q])
            near = (position_N[q] - position_N[k] < window) if window is not None else True
            return (own | trunk) & near

        return create_block_mask(seen, None, None, pack.length, pack.length, device=device)

    if device_type == "cpu":
        return flex_attention, block_mask
    # Compiled, the mask's blocks are made without the mask of all pairs of tokens.
    create_block_mask = torch.compile(create_block_mask, dynamic=True)
    return torch.compile(flex_attention, dynamic=True), block_mask


# Not "flash": transformers takes any name with that word in it for a package of its own.
KERNELS = {"varlen": flash, "flex": flex, "sdpa": sdpa}


def row_by_row(
    query, key, value, rows: tuple[PackedRow, ...], *, scaling, window=None, softcap=None
) -> torch.Tensor:
    """The definition: every trunk and every branch with its own keys, scores in plain sight. For proofs and tests."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    parts = []
    for row in rows:
        at = row.start
        for base, tokens in ((0, row.trunk), *row.branches):
            places = [*range(row.start, row.start + base), *range(at, at + tokens)]
            q, k, v = query[:, :, at : at + tokens], key[:, :, places], value[:, :, places]
            position = torch.arange(base, base + tokens, device=q.device)
            distance = position[:, None] - torch.arange(base + tokens, device=q.device)[None]
            mask = (distance >= 0) if window is None else (distance >= 0) & (distance < window)
            scores = (q @ k.transpose(2, 3)).double() * scaling
            scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
            weights = scores.masked_fill(~mask, -torch.inf).softmax(dim=-1)
            parts.append((weights @ v.double()).to(q.dtype))
            at += tokens
    return torch.cat(parts, dim=2).transpose(1, 2)
