"""Anchors: ids of the states that turns start from, equal where the states of one prompt are the same.

`gigpo`, `hgpo` and `g2po` compare turns by the states that they start from. A state is given per
trajectory and turn (a text, a number, a list, a dict, an array; None where there is none), rows of different length. The
result has a column per turn of the longest row, or ``columns``, and -1 where there is no state.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

from verl_credit.lazy import torch


def exact_anchors(
    states: Sequence[Sequence[Any]], group_B: Sequence[Hashable], *, columns: int | None = None
) -> torch.Tensor:
    """Ids of equal states of a prompt, int64 [rows, turns].

    Types and shapes count: True, 1 and 1.0 are three states, and so are arrays of equal content and different shape
    (released code takes them for one). Raises TypeError for what has no fixed value (a set of lists, an
    unhashable type of the user's), and ValueError for NaN, with row and turn.
    """
    groups = group_B.tolist() if hasattr(group_B, "tolist") else list(group_B)
    if len(groups) != len(states):
        raise ValueError(f"group_B has {len(groups)} entries; expected {len(states)}, as states has rows")
    ids: dict[Any, int] = {}
    rows = []
    for row, (turns, group) in enumerate(zip(states, groups, strict=True)):
        if isinstance(turns, str) or not isinstance(turns, Sequence):
            raise TypeError(
                f"states row {row} is a {type(turns).__name__}; expected a list with a state per turn"
            )
        keys = [None if state is None else (group, _key(state, row, k)) for k, state in enumerate(turns)]
        rows.append([-1 if key is None else ids.setdefault(key, len(ids)) for key in keys])
    longest = max(map(len, rows), default=0)
    columns = longest if columns is None else columns
    if columns < longest:
        raise ValueError(f"columns={columns}: expected at least {longest}, the turns of the longest row")
    padded = [row + [-1] * (columns - len(row)) for row in rows]
    return torch.tensor(padded, dtype=torch.long).view(len(rows), columns)


def _key(state: Any, row: int, turn: int) -> Hashable:
    """Equal where value, type and shape are equal."""
    kind = type(state).__name__
    if isinstance(state, list | tuple):
        return (kind, *(_key(item, row, turn) for item in state))
    if isinstance(state, Mapping):
        return (kind, frozenset((_key(k, row, turn), _key(v, row, turn)) for k, v in state.items()))
    if hasattr(state, "shape") and hasattr(state, "dtype") and hasattr(state, "tolist"):
        return (kind, str(state.dtype), tuple(state.shape), _key(state.tolist(), row, turn))
    if isinstance(state, float) and state != state:
        raise ValueError(f"states row {row}, turn {turn} holds NaN, which equals nothing; None is no state")
    try:
        hash(state)
    except TypeError as error:
        raise TypeError(
            f"states row {row}, turn {turn} holds a {kind}, which cannot be hashed; expected a text, a number, a list, a "
            "dict or an array"
        ) from error
    return (kind, state)
