"""The places of rows and their branches in a packed stream, with the tables and memory limits of the kernels."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate

from verl_credit.lazy import torch

# Limits of the memory for scored answers at a time, which `plan` reads. A single answer is never divided.
KEY_TOKENS = 2**16
"""varlen: tokens whose keys and values are gathered at a time."""
MASK_NUMBERS = 2**24
"""SDPA: numbers in a mask, queries x keys; with a softcap, in the scores of all heads."""

PACK = "credit_pack"
"""The keyword under which models pass a pack on to their attention."""

Branch = tuple[int, int]
"""(base, tokens): the branch sees the first ``base`` tokens of its row's prefix, and itself."""


@dataclass(frozen=True)
class PackedRow:
    """A prefix begins at ``start`` with ``trunk`` tokens; its branches follow it."""

    start: int
    trunk: int
    branches: tuple[Branch, ...] = ()

    @property
    def length(self) -> int:
        return self.trunk + sum(tokens for _, tokens in self.branches)

    @property
    def segments(self) -> list[tuple[int, int, int]]:
        """(place in the stream, base, tokens) of the prefix, whose base is 0, and of each branch."""
        both = ((0, self.trunk), *self.branches)
        starts = accumulate((tokens for _, tokens in both), initial=self.start)
        return [(at, base, tokens) for at, (base, tokens) in zip(starts, both, strict=False)]


@dataclass(frozen=True)
class Reach:
    """The places of the stream that every token sees: from ``own_N`` to itself, and from ``trunk_N`` to before ``end_N``.

    int32 [N]. The first range is in the token's own prefix or branch; the second is in a branch token's prefix, and empty
    for other tokens. Both starts already respect a sliding window.
    """

    own_N: torch.Tensor
    trunk_N: torch.Tensor
    end_N: torch.Tensor

    def sees(self, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        """Returns whether the token at place ``query`` sees the token at ``key``; both broadcast."""
        own = (self.own_N[query] <= key) & (key <= query)
        return own | ((self.trunk_N[query] <= key) & (key < self.end_N[query]))


class Pack:
    """One micro-batch, whose tables all layers share.

    It is no dataclass, tuple or dict: FSDP copies those at every layer to cast their tensors, without later tables.
    """

    def __init__(self, rows: tuple[PackedRow, ...]):
        self.rows, self._tables = rows, {}

    def __repr__(self) -> str:
        return f"Pack({self.rows!r})"

    @property
    def length(self) -> int:
        return self.rows[-1].start + self.rows[-1].length if self.rows else 0

    def require(self, name: str, rows: int, tokens: int) -> None:
        """Raises RuntimeError when a layer gets other tokens than this pack's."""
        if rows != 1 or tokens != self.length:
            why = f"for a pack of {self.length}: is a sequence-parallel size above 1 set?"
            raise RuntimeError(f"{name} got {rows} x {tokens} tokens {why}")

    def position_ids(self) -> torch.Tensor:
        """The positions are 0, 1, ... along a prefix; a branch continues from its base."""
        segments = [(base, base + tokens) for row in self.rows for _, base, tokens in row.segments]
        return torch.cat([torch.arange(0), *(torch.arange(*ends) for ends in segments)])

    def reach(self, window: int | None, device) -> Reach:
        """The `Reach` of all tokens, made once per window and device."""
        return self.once(("reach", window, device), lambda: _reach(self.rows, window, device))

    def once(self, key, make):
        """The result of ``make``, kept under ``key`` for the following layers."""
        if key not in self._tables:
            self._tables[key] = make()
        return self._tables[key]


@contextmanager
def pushed(stack: list, value):
    """``value`` is the last of ``stack`` inside the block."""
    stack.append(value)
    try:
        yield value
    finally:
        stack.pop()


def pack_rows(trunks: Sequence[int], branches: Sequence[Sequence[Branch]] | None = None) -> Pack:
    """Put rows one after the other; bases in any order. Raises ValueError for a base outside the prefix, an empty branch."""
    branches = [()] * len(trunks) if branches is None else branches
    rows, start = [], 0
    for number, (trunk, own) in enumerate(zip(trunks, branches, strict=True)):
        for base, tokens in own:
            if not 0 < base <= trunk or tokens < 1:
                given = f"row {number} of {trunk} tokens has a branch of {tokens} tokens at {base}"
                raise ValueError(f"{given}; expected at least one token, at 1 to {trunk}")
        rows.append(PackedRow(start, trunk, tuple((int(base), int(tokens)) for base, tokens in own)))
        start += rows[-1].length
    return Pack(tuple(rows))


def _reach(rows: Sequence[PackedRow], window: int | None, device) -> Reach:
    segments = [(at, base, tokens, row.start) for row in rows for at, base, tokens in row.segments]
    table = torch.tensor(segments, dtype=torch.int32).reshape(-1, 4)
    first_N, base_N, _, row_N = table.repeat_interleave(table[:, 2].long(), dim=0).unbind(1)
    own_N, trunk_N, end_N = first_N, row_N, row_N + base_N
    if window is not None:
        place_N = torch.arange(len(own_N), dtype=torch.int32)
        own_N = torch.maximum(own_N, place_N - window + 1)
        # base + (place - first) is its position; a prefix's token at place k has position k - row.
        trunk_N = torch.maximum(trunk_N, row_N + base_N + place_N - first_N - window + 1)
    return Reach(own_N.contiguous().to(device), trunk_N.contiguous().to(device), end_N.to(device))
