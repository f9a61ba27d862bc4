"""flash-attn's varlen call over rows and branches. Only this file uses flash-attn's attention."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate

import torch

from verl_credit.policy.attention.pack import KEY_TOKENS, Pack

Lengths = tuple[torch.Tensor, torch.Tensor, int, int]
"""The cumulative numbers of tokens of queries and keys (int32), and the longest of each, as flash-attn's call takes them."""


def varlen(
    query, key, value, pack: Pack, *, scaling, window=None, softcap=None, dropout=0.0, call=None
) -> torch.Tensor:
    """Every row as one causal sequence, which is correct for prefixes; then the branches, some at a time, over gathered
    keys, to replace their outputs."""
    if call is None:
        from flash_attn import flash_attn_varlen_func as call
    device = query.device
    q, k, v = (tensor[0].transpose(0, 1).contiguous() for tensor in (query, key, value))
    options = {"dropout_p": dropout, "softmax_scale": scaling, "causal": True}
    if window is not None:
        options["window_size"] = (window - 1, 0)
    if softcap is not None:
        options["softcap"] = softcap
    rows = pack.once(("rows", device), lambda: _lengths([row.length for row in pack.rows], device))
    out = call(q, k, v, *rows, **options)
    some = pack.once(("branches", KEY_TOKENS, device), lambda: list(_branches(pack, KEY_TOKENS, device)))
    if some:
        places = ("branch places", KEY_TOKENS, device)
        every_N = pack.once(places, lambda: torch.cat([query_N for query_N, *_ in some]))
        outputs = [
            call(q[query_N], k[key_N], v[key_N], *lengths, **options) for query_N, key_N, lengths in some
        ]
        out = out.index_copy(0, every_N, torch.cat(outputs))
    return out[None]


def _branches(pack: Pack, most: int, device) -> Iterator[tuple[torch.Tensor, torch.Tensor, Lengths]]:
    """(places of the queries, places of the keys, lengths) of successive branches that need at most ``most`` keys."""
    waiting: list[tuple[int, int, int, int]] = []  # place of the row, place of the branch, base, tokens
    needed = 0
    for row in pack.rows:
        for at, base, tokens in row.segments[1:]:
            if waiting and needed + base + tokens > most:
                yield _table(waiting, device)
                waiting, needed = [], 0
            waiting.append((row.start, at, base, tokens))
            needed += base + tokens
    if waiting:
        yield _table(waiting, device)


def _table(branches: list[tuple[int, int, int, int]], device) -> tuple[torch.Tensor, torch.Tensor, Lengths]:
    own = [torch.arange(at, at + tokens) for _, at, _, tokens in branches]
    trunk = [torch.arange(start, start + base) for start, _, base, _ in branches]
    keys = [places for pair in zip(trunk, own, strict=True) for places in pair]
    lengths = _lengths(list(map(len, own)), device, [base + tokens for *_, base, tokens in branches])
    return torch.cat(own).to(device), torch.cat(keys).to(device), lengths


def _lengths(queries: list[int], device, keys: list[int] | None = None) -> Lengths:
    """Returns the `Lengths` of these numbers of tokens; without ``keys`` there are as many keys as queries."""
    both = (queries, queries if keys is None else keys)
    cumulative = [torch.tensor([0, *accumulate(one)], dtype=torch.int32, device=device) for one in both]
    return *cumulative, *(max(one, default=0) for one in both)
