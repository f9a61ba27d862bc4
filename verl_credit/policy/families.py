"""Neighbouring rows that begin alike, such as the rollouts of a prompt, as one packed row with their common tokens once.

One of the rows is the prefix of the packed row. The others are branches after the tokens that they share with it. A token
attends to the same tokens as in a row of its own, so its hidden state and its gradient are the same, up to rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

Shape = list[tuple[int, int]]
"""(base, tokens) of each branch of a packed row."""


@dataclass(frozen=True)
class Family:
    """``stream`` holds the prefix's tokens, then the tokens of the branches in ``shape``."""

    rows: range
    stream: torch.Tensor
    shape: Shape
    places: list[torch.Tensor]
    """The places of each row's tokens in ``stream``."""

    @property
    def trunk(self) -> int:
        """The number of the prefix's tokens."""
        return len(self.stream) - sum(tokens for _, tokens in self.shape)


def families(prompts: Sequence[torch.Tensor], responses: Sequence[torch.Tensor]) -> list[Family]:
    """The families in the order of the rows; a new one begins where the prompt changes."""
    starts = [
        row for row in range(len(prompts)) if row == 0 or not torch.equal(prompts[row - 1], prompts[row])
    ]
    return [
        _family(range(*ends), [torch.cat((prompts[i], responses[i])) for i in range(*ends)])
        for ends in pairwise([*starts, len(prompts)])
    ]


@dataclass(frozen=True)
class Reads:
    """P different (place, token) pairs of a packed stream, for N read tokens: rows that share both share the logits."""

    place_P: torch.Tensor
    """The places of the logits, which are at the token before."""
    label_P: torch.Tensor
    pair_N: torch.Tensor
    """The pair of each read token, row by row."""


def reads(
    members: Sequence[Family],
    prompts: Sequence[torch.Tensor],
    responses: Sequence[torch.Tensor],
    *,
    vocabulary: int,
    read_B_T: torch.Tensor | None = None,
) -> Reads:
    """The response tokens that ``read_B_T`` marks (None: all) in the members' streams, which follow each other."""
    first, before, labels = 0, [], []
    for one in members:
        for row, places in zip(one.rows, one.places, strict=True):
            read = slice(None) if read_B_T is None else read_B_T[row, : len(responses[row])]
            before.append(first + places[len(prompts[row]) - 1 : -1][read])
            labels.append(responses[row][read])
        first += len(one.stream)
    pair_P, pair_N = torch.unique(torch.cat(before) * vocabulary + torch.cat(labels), return_inverse=True)
    return Reads(pair_P // vocabulary, pair_P % vocabulary, pair_N)


def _family(rows: range, streams: list[torch.Tensor]) -> Family:
    """Takes as prefix the row with which the branches have the fewest tokens of their own."""
    distinct = list({tuple(stream.tolist()): stream for stream in streams}.values())
    bases = [[_shared(trunk, stream) for stream in distinct] for trunk in distinct]
    tokens = [len(trunk) - sum(base) for trunk, base in zip(distinct, bases, strict=True)]
    trunk = distinct[tokens.index(min(tokens))]
    parts, shape, places, at = [trunk], [], {}, len(trunk)
    for stream, base in zip(distinct, bases[tokens.index(min(tokens))], strict=True):
        own = stream[base:]
        places[tuple(stream.tolist())] = torch.cat((torch.arange(base), torch.arange(at, at + len(own))))
        if len(own):
            parts.append(own)
            shape.append((base, len(own)))
            at += len(own)
    return Family(rows, torch.cat(parts), shape, [places[tuple(stream.tolist())] for stream in streams])


def _shared(a: torch.Tensor, b: torch.Tensor) -> int:
    """The number of first tokens that are the same in both."""
    n = min(len(a), len(b))
    same = a[:n] == b[:n]
    return n if bool(same.all()) else int(same.int().argmin())
