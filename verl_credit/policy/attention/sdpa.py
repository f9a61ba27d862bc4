"""torch's scaled_dot_product_attention over rows and branches, piece by piece.

Keys are not repeated for their query heads: key heads take the batch dimension, and their query heads see them through a
view of stride 0, which the fused backends accept, also with a mask (pytorch#191085). With ``enable_gqa=True`` CUDA's
backend for masks refuses, and torch falls back to one that makes all scores in float32.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from math import isqrt

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

from verl_credit.policy.attention.pack import MASK_NUMBERS, Pack, PackedRow

LEAST_QUERIES = 512
"""Least queries of a piece, also under a shorter window, to avoid many small calls."""
UNSEEN = 2**15
"""A branch joins the branches before it in one piece while this adds no more scores of places that no query sees."""

# Backends on a GPU. cuDNN's is left out because it plans again for every new length (half a second each on a B200:
# FunASR#3704), and torch's own because it makes all scores: a call that no fused backend accepts is an error.
FUSED = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]


@dataclass(frozen=True)
class Piece:
    """Queries at [start, end) of the stream, and the places of their keys. ``mask`` None: causal, over the same places."""

    start: int
    end: int
    keys: tuple[slice, ...]
    mask: torch.Tensor | None


def sdpa(query, key, value, pack: Pack, *, scaling, window=None, softcap=None, dropout=0.0) -> torch.Tensor:
    """Attends causally in each prefix, then with a mask from its branches, some at a time, to the prefix and themselves."""
    key_of_table = ("pieces", window, MASK_NUMBERS, query.device)
    pieces = pack.once(key_of_table, lambda: list(_pieces(pack, window, query.device)))
    heads, groups = key.shape[1], query.shape[1] // key.shape[1]
    q, k, v = query[0].unflatten(0, (heads, groups)), key[0], value[0]
    fused = query.is_cuda and query.dtype != torch.float64
    parts = []
    with sdpa_kernel(FUSED) if fused else nullcontext():
        for piece, own, *seen in _split(pieces, q, k, v):
            if softcap is None:
                seen = [x[:, None].expand(-1, groups, -1, -1) for x in seen]
                part = scaled_dot_product_attention(
                    own, *seen, piece.mask, dropout, is_causal=piece.mask is None, scale=scaling
                )
            else:
                part = _softcapped(own, *seen, piece.mask, scaling, softcap, dropout)
            parts.append(part.permute(2, 0, 1, 3))
    return torch.cat(parts).flatten(1, 2)[None]


def _split(pieces: list[Piece], q, k, v) -> Iterator[tuple]:
    """(piece, its queries, keys, values). The backward of a split is one copy; each slice's is as long as the stream."""
    tokens = [piece.end - piece.start for piece in pieces]
    own = q.split(tokens, dim=2)
    if all(piece.mask is None for piece in pieces):
        yield from zip(pieces, own, k.split(tokens, dim=1), v.split(tokens, dim=1), strict=True)
        return
    for piece, queries in zip(pieces, own, strict=True):
        parts = [([x[:, places] for places in piece.keys]) for x in (k, v)]
        yield piece, queries, *(one[0] if len(one) == 1 else torch.cat(one, dim=1) for one in parts)


def _pieces(pack: Pack, window: int | None, device) -> Iterator[Piece]:
    for row in pack.rows:
        yield from _trunk(pack, row, window, device)
        yield from _branches(pack, row, window, device)


def _trunk(pack: Pack, row: PackedRow, window: int | None, device) -> Iterator[Piece]:
    start, end = row.start, row.start + row.trunk
    if window is None or window >= row.trunk:
        yield Piece(start, end, (slice(start, end),), None)
        return
    step = _step(window)
    for first in range(start, end, step):
        last = min(first + step, end)
        keys = slice(max(start, first - window + 1), last)
        yield Piece(first, last, (keys,), _mask(pack, first, last, (keys,), window, device))


def _step(window: int) -> int:
    """The largest number n of queries whose mask of n (n + window - 1) numbers fits, at most about the window."""
    most = (isqrt((window - 1) ** 2 + 4 * MASK_NUMBERS) - (window - 1)) // 2
    return max(1, min(most, max(window, LEAST_QUERIES)))


def _branches(pack: Pack, row: PackedRow, window: int | None, device) -> Iterator[Piece]:
    first = last = row.start + row.trunk
    furthest = 0
    for base, tokens in row.branches:
        before, queries = last - first, last + tokens - first
        together = queries * (max(furthest, base) + queries)
        apart = before * (furthest + before) + tokens * (base + tokens)
        if last > first and (together > MASK_NUMBERS or together - apart > UNSEEN):
            yield _branch_piece(pack, row, first, last, furthest, window, device)
            first, furthest = last, 0
        last, furthest = last + tokens, max(furthest, base)
    if last > first:
        yield _branch_piece(pack, row, first, last, furthest, window, device)


def _branch_piece(pack, row: PackedRow, first: int, last: int, base: int, window, device) -> Piece:
    keys = (slice(row.start, row.start + base), slice(first, last))
    if keys[0].stop == first:
        keys = (slice(row.start, last),)
    return Piece(first, last, keys, _mask(pack, first, last, keys, window, device))


def _mask(pack: Pack, first: int, last: int, keys: tuple[slice, ...], window, device) -> torch.Tensor:
    """bool [queries, keys]."""
    key_K = torch.cat([torch.arange(places.start, places.stop, device=device) for places in keys])
    return pack.reach(window, device).sees(torch.arange(first, last, device=device)[:, None], key_K[None])


def _softcapped(q, k, v, mask, scaling, softcap, dropout) -> torch.Tensor:
    """SDPA has no softcap, so explicit scores are made for some queries at a time, and again in the backward.

    Query [key heads, groups, n, D], key and value [key heads, m, D].
    """
    step = max(1, MASK_NUMBERS // (q.shape[0] * q.shape[1] * k.shape[1]))
    parts = []
    for first in range(0, q.shape[2], step):
        own = q[:, :, first : first + step]
        if mask is None:  # the keys up to the last of these queries
            last = first + own.shape[2]
            places = torch.arange(last, device=q.device)
            given = own, k[:, :last], v[:, :last], places[None] <= places[first:, None]
        else:
            given = own, k, v, mask[first : first + step]
        given = *given, scaling, softcap, dropout
        again = torch.is_grad_enabled()
        parts.append(checkpoint(_scored, *given, use_reentrant=False) if again else _scored(*given))
    return torch.cat(parts, dim=2)


def _scored(q, k, v, mask, scaling, softcap, dropout) -> torch.Tensor:
    raw = (q.flatten(1, 2) @ k.transpose(1, 2)).unflatten(1, q.shape[1:3])
    scores = (softcap * torch.tanh(raw * scaling / softcap)).masked_fill(~mask, -torch.inf)
    weights = scores.to(torch.promote_types(scores.dtype, torch.float32)).softmax(dim=-1).to(v.dtype)
    weights = torch.dropout(weights, dropout, dropout > 0)
    return (weights.flatten(1, 2) @ v).unflatten(1, q.shape[1:3])
