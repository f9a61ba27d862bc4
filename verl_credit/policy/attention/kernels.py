"""Three kernels for attention over a packed stream of rows and branches, the definition they share, and the trial of a
kernel against it on this device, with a model's own heads.

A token sees the tokens of its own segment up to itself. In a branch it also sees the first ``base`` tokens of its row's
prefix. With a sliding window it sees only those fewer than ``window`` positions back.
Shapes: query [1, heads, N, D], key and value [1, kv heads, N, D]; the result is [1, N, heads, D].
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from verl_credit.policy.attention.flex import flex
from verl_credit.policy.attention.pack import Pack, PackedRow, pack_rows
from verl_credit.policy.attention.sdpa import sdpa
from verl_credit.policy.attention.varlen import varlen

# No name contains "flash": transformers takes such a name for a package of its own.
KERNELS = {"varlen": varlen, "sdpa": sdpa, "flex": flex}


def row_by_row(
    query, key, value, rows: tuple[PackedRow, ...], *, scaling, window=None, softcap=None
) -> torch.Tensor:
    """The definition, for proofs and tests: every prefix and branch has its own keys and explicit scores."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    parts = []
    for row in rows:
        for at, base, tokens in row.segments:
            places = [*range(row.start, row.start + base), *range(at, at + tokens)]
            q, k, v = query[:, :, at : at + tokens], key[:, :, places], value[:, :, places]
            position = torch.arange(base, base + tokens, device=q.device)
            distance = position[:, None] - torch.arange(base + tokens, device=q.device)[None]
            mask = (distance >= 0) if window is None else (distance >= 0) & (distance < window)
            scores = (q @ k.transpose(2, 3)).double() * scaling
            scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
            weights = scores.masked_fill(~mask, -torch.inf).softmax(dim=-1)
            parts.append((weights @ v.double()).to(q.dtype))
    return torch.cat(parts, dim=2).transpose(1, 2)


TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 0.15}
"""Measured on a CPU, with 4 query heads and 2 key heads of 8 and of 64, and with 32 and 8 of 128: correct kernels at most
2.8e-5 (float32), 0.009 and 0.079; a branch that sees one token too many 0.39, one too few 0.99, a window off by one 1.2."""

# 782 tokens, seven blocks of 128. Bases after, on and before the borders at 128, 256 and (row 2 begins at 475) 512 of
# the stream; the whole prefix and its first token; a branch longer than a block.
TRUNKS = (301, 140, 170)
BRANCHES = (
    ((301, 3), (257, 5), (256, 4), (255, 2), (129, 7), (128, 6), (127, 3), (1, 4)),
    (),
    ((38, 131), (37, 3), (36, 3)),
)
LOUD = 4
OPTIONS = ({}, {"window": 5}, {"window": 131}, {"softcap": 2.0})


class Heads(NamedTuple):
    """A model's number of query heads, of key heads, and their size."""

    queries: int
    keys: int
    size: int


def trial(kernel: Callable, device: torch.device, dtype: torch.dtype, heads: Heads, gradients: bool) -> float:
    """Largest difference from the definition in float64, relative where values exceed 1: of the output and, with
    ``gradients``, half of the gradients', because roundings add up in them."""
    pack = pack_rows(TRUNKS, BRANCHES)
    given, loss = draw(pack, heads, device, dtype)

    def run(attend, rows, wanted, **options) -> list[torch.Tensor]:
        leaves = [tensor.to(wanted, copy=True).requires_grad_(gradients) for tensor in given]
        with torch.set_grad_enabled(gradients):
            out = attend(*leaves, rows, scaling=heads.size**-0.5, **options)
            if gradients:
                (out * loss.to(wanted)).sum().backward()
        return [out.detach(), *(leaf.grad for leaf in leaves if gradients)]

    apart = []
    for options in OPTIONS:
        values = run(kernel, pack, dtype, **options)
        exact = run(row_by_row, pack.rows, torch.float64, **options)
        for weight, ours, right in zip((1, 0.5, 0.5, 0.5), values, exact, strict=False):
            apart.append(weight * ((ours.double() - right).abs() / right.abs().clamp(min=1)).max())
    return float(torch.stack(apart).max())  # NaN where one is NaN


def draw(pack: Pack, heads: Heads, device, dtype) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Query, key, value, and the weights [1, N, heads, D] of a loss.

    Keys on both sides of every border are ``LOUD`` times larger: one of hundreds of similar keys would hardly matter.
    """
    random = torch.Generator().manual_seed(0)
    counts = (heads.queries, heads.keys, heads.keys, heads.queries)
    query, key, value, weight = (
        torch.randn(1, count, pack.length, heads.size, generator=random) for count in counts
    )
    key[:, :, _borders(pack)] *= LOUD
    given = [tensor.to(device, dtype) for tensor in (query, key, value)]
    return given, weight.to(device, dtype).transpose(1, 2)


def _borders(pack: Pack) -> list[int]:
    """The places before and after each end of a prefix, a base and a branch."""
    ends = []
    for row in pack.rows:
        for at, base, tokens in row.segments:
            ends += [row.start + base, at + tokens] if base else [at + tokens]
    return sorted({place for end in ends for place in (end - 1, end) if place < pack.length})
