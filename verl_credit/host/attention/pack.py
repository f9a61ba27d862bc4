"""Where rows and their branches lie in a packed stream, and what every kernel needs to know of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

Branch = tuple[int, int]
"""(base, tokens): it sees the first ``base`` tokens of its row's trunk, and itself."""


@dataclass(frozen=True)
class PackedRow:
    """A trunk at [start, start + trunk) and behind it its branches, one after the other."""

    start: int
    trunk: int
    branches: tuple[Branch, ...] = ()

    @property
    def branch_tokens(self) -> int:
        return sum(tokens for _, tokens in self.branches)

    @property
    def length(self) -> int:
        return self.trunk + self.branch_tokens


@dataclass(frozen=True)
class FlashTables:
    """Index tables of the two varlen calls; lengths are cumulative, int32."""

    cu_rows: torch.Tensor
    longest_row: int
    branch_N: torch.Tensor
    """Places of the branch tokens in the stream."""
    key_N: torch.Tensor
    """Places of the keys of branch after branch: the trunk up to its base, then itself."""
    cu_branches: torch.Tensor
    cu_keys: torch.Tensor
    longest_branch: int
    longest_keys: int


class Pack:
    """One micro-batch. Tables are made once and shared by all layers.

    Not a dataclass, tuple or dict: FSDP copies those at every layer to cast the tensors in them, and a copy knows
    no tables that are made after it.
    """

    def __init__(self, rows: tuple[PackedRow, ...]):
        self.rows = rows
        self._tables: dict = {}

    def __repr__(self) -> str:
        return f"Pack({self.rows!r})"

    @property
    def length(self) -> int:
        return self.rows[-1].start + self.rows[-1].length if self.rows else 0

    def position_ids(self) -> torch.Tensor:
        """0, 1, ... along a trunk; a branch goes on from its base."""
        parts = []
        for row in self.rows:
            parts.append(torch.arange(row.trunk))
            parts += [torch.arange(base, base + tokens) for base, tokens in row.branches]
        return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.long)

    def trunk_mask(self, row: PackedRow, window: int | None, device) -> torch.Tensor | None:
        """bool [trunk, trunk] where a window cuts into the trunk; None where plain causal attention is right."""
        if window is None or window >= row.trunk:
            return None
        return self._once(("trunk", row.trunk, window, device), lambda: _causal(row.trunk, window, device))

    def branch_mask(self, row: PackedRow, window: int | None, device) -> torch.Tensor:
        """bool [branch tokens, row tokens]: what the row's branch tokens see of the row."""
        return self._once(("branch", row.start, window, device), lambda: _branch_mask(row, window, device))

    def flash_tables(self, device) -> FlashTables:
        return self._once(("flash", device), lambda: _flash_tables(self.rows, device))

    def row_and_base(self, device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Per token, int64: the start of its segment (trunk or branch), of its row, and the base of its branch (0)."""
        return self._once(("flex", device), lambda: _row_and_base(self.rows, device))

    def _once(self, key, make):
        if key not in self._tables:
            self._tables[key] = make()
        return self._tables[key]


def pack_rows(trunks: Sequence[int], branches: Sequence[Sequence[Branch]] | None = None) -> Pack:
    """Rows one after the other. Bases may stand in any order but must lie within the trunk.

    Raises ValueError for a branch that grows from nowhere or is empty.
    """
    branches = [()] * len(trunks) if branches is None else branches
    rows, start = [], 0
    for number, (trunk, grown) in enumerate(zip(trunks, branches, strict=True)):
        for base, tokens in grown:
            if not 0 < base <= trunk or tokens < 1:
                raise ValueError(
                    f"row {number} of {trunk} tokens has a branch of {tokens} tokens at {base}; "
                    f"expected at least one token, at 1 to {trunk}"
                )
        row = PackedRow(start, trunk, tuple((int(base), int(tokens)) for base, tokens in grown))
        rows.append(row)
        start += row.length
    return Pack(tuple(rows))


def _causal(n: int, window: int | None, device) -> torch.Tensor:
    distance = torch.arange(n, device=device)[:, None] - torch.arange(n, device=device)[None]
    return (distance >= 0) if window is None else (distance >= 0) & (distance < window)


def _branch_mask(row: PackedRow, window: int | None, device) -> torch.Tensor:
    mask = torch.zeros(row.branch_tokens, row.length, dtype=torch.bool, device=device)
    at = 0
    for base, tokens in row.branches:
        own = _causal(tokens, window, device)
        mask[at : at + tokens, row.trunk + at : row.trunk + at + tokens] = own
        first = 0 if window is None else max(0, base + 1 - window)
        mask[at : at + tokens, first:base] = True
        if window is not None:  # the window moves on with every token of the branch
            position = torch.arange(base, base + tokens, device=device)
            seen = position[:, None] - torch.arange(row.trunk, device=device)[None] < window
            mask[at : at + tokens, : row.trunk] &= seen
        at += tokens
    return mask


def _flash_tables(rows: Sequence[PackedRow], device) -> FlashTables:
    lengths = [row.length for row in rows]
    places, keys, n_places, n_keys = [], [], [], []
    for row in rows:
        at = row.start + row.trunk
        for base, tokens in row.branches:
            own = torch.arange(at, at + tokens)
            places.append(own)
            keys += [torch.arange(row.start, row.start + base), own]
            n_places.append(tokens)
            n_keys.append(base + tokens)
            at += tokens

    def joined(parts):
        return (torch.cat(parts) if parts else torch.zeros(0, dtype=torch.long)).to(device)

    def cumulative(counts):
        return torch.tensor([0, *accumulate(counts)], dtype=torch.int32, device=device)

    return FlashTables(
        cumulative(lengths), max(lengths, default=0), joined(places), joined(keys),
        cumulative(n_places), cumulative(n_keys), max(n_places, default=0), max(n_keys, default=0),
    )  # fmt: skip


def _row_and_base(rows: Sequence[PackedRow], device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    segment, row_start, base_of = [], [], []
    for row in rows:
        at = row.start
        for base, tokens in ((0, row.trunk), *row.branches):
            segment += [at] * tokens
            row_start += [row.start] * tokens
            base_of += [base] * tokens
            at += tokens
    return tuple(torch.tensor(values, device=device) for values in (segment, row_start, base_of))
