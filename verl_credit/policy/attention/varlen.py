"""flash-attn's varlen call over rows and branches. Only this file uses flash-attn's attention."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate

import torch

from verl_credit.policy.attention.pack import KEY_TOKENS, Pack, PackedRow


@dataclass(frozen=True)
class Rows:
    """Cumulative lengths of the rows, int32, and the longest."""

    cumulative: torch.Tensor
    longest: int


@dataclass(frozen=True)
class Branches:
    """Some of the branches: the places of their tokens and keys in the stream, and cumulative lengths (int32)."""

    query_N: torch.Tensor
    key_N: torch.Tensor
    cumulative_queries: torch.Tensor
    cumulative_keys: torch.Tensor
    longest_query: int
    longest_keys: int


def varlen(
    query, key, value, pack: Pack, *, scaling, window=None, softcap=None, dropout=0.0, call=None
) -> torch.Tensor:
    """Every row as one causal sequence, which is correct for prefixes; then the branches, some at a time, over gathered
    keys, to replace their outputs."""
    call = call or flash_varlen()
    device = query.device
    q, k, v = (tensor[0].transpose(0, 1).contiguous() for tensor in (query, key, value))
    options = {"dropout_p": dropout, "softmax_scale": scaling, "causal": True}
    if window is not None:
        options["window_size"] = (window - 1, 0)
    if softcap is not None:
        options["softcap"] = softcap
    rows = pack.once(("rows", device), lambda: _rows(pack, device))
    out = call(q, k, v, *[rows.cumulative] * 2, *[rows.longest] * 2, **options)
    some = pack.once(("branches", KEY_TOKENS, device), lambda: list(_branches(pack, KEY_TOKENS, device)))
    outputs = [
        call(
            q[b.query_N], k[b.key_N], v[b.key_N], b.cumulative_queries, b.cumulative_keys, b.longest_query,
            b.longest_keys, **options,
        )
        for b in some
    ]  # fmt: skip
    if outputs:
        out = out.index_copy(0, torch.cat([b.query_N for b in some]), torch.cat(outputs))
    return out[None]


def flash_varlen():
    from flash_attn import flash_attn_varlen_func

    return flash_attn_varlen_func


def _rows(pack: Pack, device) -> Rows:
    lengths = [row.length for row in pack.rows]
    return Rows(_cumulative(lengths, device), max(lengths, default=0))


def _branches(pack: Pack, most: int, device) -> Iterator[Branches]:
    """Successive branches together, as long as they need at most ``most`` keys."""
    waiting: list[tuple[PackedRow, int, int, int]] = []  # row, base, place of the branch, tokens
    needed = 0
    for row in pack.rows:
        at = row.start + row.trunk
        for base, tokens in row.branches:
            if waiting and needed + base + tokens > most:
                yield _table(waiting, device)
                waiting, needed = [], 0
            waiting.append((row, base, at, tokens))
            needed += base + tokens
            at += tokens
    if waiting:
        yield _table(waiting, device)


def _table(branches: list[tuple[PackedRow, int, int, int]], device) -> Branches:
    own = [torch.arange(at, at + tokens) for _, _, at, tokens in branches]
    trunk = [torch.arange(row.start, row.start + base) for row, base, _, _ in branches]
    keys = [places for pair in zip(trunk, own, strict=True) for places in pair]
    n_queries = [tokens for *_, tokens in branches]
    n_keys = [base + tokens for _, base, _, tokens in branches]
    return Branches(
        torch.cat(own).to(device), torch.cat(keys).to(device), _cumulative(n_queries, device),
        _cumulative(n_keys, device), max(n_queries), max(n_keys),
    )  # fmt: skip


def _cumulative(counts: list[int], device) -> torch.Tensor:
    return torch.tensor([0, *accumulate(counts)], dtype=torch.int32, device=device)
