"""Three kernels for attention over a packed stream of rows and branches, and the definition they share.

A token sees the tokens of its own segment up to itself. In a branch it also sees the first ``base`` tokens of its row's
trunk. With a sliding window it sees only those fewer than ``window`` positions back.
Shapes: query [1, heads, N, D], key and value [1, kv heads, N, D]; the result is [1, N, heads, D].
"""

from __future__ import annotations

import torch

from verl_credit.policy.attention.flex import flex
from verl_credit.policy.attention.pack import PackedRow
from verl_credit.policy.attention.sdpa import sdpa
from verl_credit.policy.attention.varlen import varlen

# None is called "flash": transformers takes a name with that word for one of its own packages.
KERNELS = {"varlen": varlen, "sdpa": sdpa, "flex": flex}


def row_by_row(
    query, key, value, rows: tuple[PackedRow, ...], *, scaling, window=None, softcap=None
) -> torch.Tensor:
    """The definition: every trunk and branch with its own keys and explicit scores. For proofs and tests."""
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
