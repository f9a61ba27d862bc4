"""Attention with one fault each, for the limits of the start-up proof. All take what `attention.kernels` take."""

from __future__ import annotations

import torch

from verl_credit.attention import pack_rows
from verl_credit.attention.sdpa import sdpa


def leaking(query, key, value, pack, **options):
    """Rows see each other: everything that stands before them in the stream."""
    return sdpa(query, key, value, pack_rows([pack.length]), **options)


def moved(query, key, value, pack, **options):
    """A token sees its predecessors, not itself, and the last of the stream."""
    return sdpa(query, key.roll(1, dims=2), value.roll(1, dims=2), pack, **options)


def acausal(query, key, value, pack, *, scaling, **_):
    """A token sees what follows it in its row and in the row's branches."""
    groups = query.shape[1] // key.shape[1]
    parts = []
    for row in pack.rows:
        place = slice(row.start, row.start + row.length)
        k, v = (x[:, :, place].repeat_interleave(groups, dim=1) for x in (key, value))
        parts.append(
            torch.nn.functional.scaled_dot_product_attention(query[:, :, place], k, v, scale=scaling)
        )
    return torch.cat(parts, dim=2).transpose(1, 2).contiguous()


def base_too_long(query, key, value, pack, **options):
    """Branches see one token more of their trunk, where it has one."""
    return sdpa(query, key, value, _with_bases(pack, 1), **options)


def base_too_short(query, key, value, pack, **options):
    """Branches see one token less of their trunk."""
    return sdpa(query, key, value, _with_bases(pack, -1), **options)


def branches_see_all(query, key, value, pack, **options):
    """Branches see their whole trunk."""
    return sdpa(query, key, value, _with_bases(pack, 10**9), **options)


def _with_bases(pack, shift: int):
    bases = [[(min(row.trunk, base + shift), n) for base, n in row.branches] for row in pack.rows]
    return pack_rows([row.trunk for row in pack.rows], bases)


WRONG = {
    fault.__name__: fault
    for fault in (leaking, moved, acausal, base_too_long, base_too_short, branches_see_all)
}
