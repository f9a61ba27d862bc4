"""Anchors: ids of the states that turns start from, equal where the states of one prompt are the same or alike.

`gigpo`, `hgpo`, `g2po` and `gagpo` compare turns by the states that they start from. A state is given per
trajectory and turn (a text, a number, a list, a dict, an array; None where there is none), rows of different length. The
result has a column per turn of the longest row, or ``columns``, and -1 where there is no state.
"""

from __future__ import annotations

import difflib
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

from verl_credit.credit.operator import Range
from verl_credit.lazy import torch


def exact_anchors(
    states: Sequence[Sequence[Any]], group_B: Sequence[Hashable], *, columns: int | None = None
) -> torch.Tensor:
    """Ids of equal states of a prompt, int64 [rows, turns].

    Types and shapes count: True, 1 and 1.0 are three states, and so are arrays of equal content and different shape
    (released code takes them for one). Raises TypeError for what has no fixed value (a set of lists, a type of one's own
    that cannot be hashed), and ValueError for NaN, with row and turn.
    """
    ids: dict[Any, int] = {}
    rows = []
    for row, (turns, group) in enumerate(_checked(states, group_B)):
        keys = [None if state is None else (group, _key(state, row, k)) for k, state in enumerate(turns)]
        rows.append([-1 if key is None else ids.setdefault(key, len(ids)) for key in keys])
    return _table(rows, columns)


def similar_anchors(
    states: Sequence[Sequence[str | None]],
    group_B: Sequence[Hashable],
    *,
    threshold: float = 0.95,
    row_key_B: Sequence[Any] | None = None,
    columns: int | None = None,
    released_order: Sequence[tuple[int, int]] | None = None,
) -> torch.Tensor:
    """Ids of clusters of similar texts of a prompt, int64 [rows, turns].

    A text joins the first cluster whose first member has a difflib ratio of at least ``threshold`` (above 0, below 1), or
    opens one. Texts come by prompt, row and turn; ``row_key_B`` orders a prompt's rows (such as the rollout's number), so
    that the order of the batch does not matter; without it they come as given.
    Similarity is not transitive: two members of a cluster may be less alike than the threshold.
    Cost: each new text is compared with its prompt's clusters, about 1 ms each for 2,500 characters.
    ``released_order``: the (row, turn) pairs in the batch's order, as released, with difflib's autojunk, which ignores
    frequent characters in texts of 200 and more.
    """
    Range(0.0, 1.0, low_allowed=False).check("threshold", threshold)
    checked = _checked(states, group_B)
    order = places = [(row, k) for row, (turns, _) in enumerate(checked) for k in range(len(turns))]
    for row, k in places:
        if not isinstance(state := states[row][k], str | None):
            raise TypeError(
                f"states row {row}, turn {k} holds a {type(state).__name__}; similarity needs texts"
            )
    if released_order is not None:
        order = [tuple(place) for place in released_order]
        if sorted(order) != places:
            raise ValueError("released_order: expected every (row, turn) of states once")
    elif row_key_B is not None:
        if len(row_key_B) != len(checked):
            raise ValueError(f"row_key_B has {len(row_key_B)} entries; expected {len(checked)}, as states")
        order = sorted(places, key=lambda place: row_key_B[place[0]])
    autojunk = released_order is not None
    clusters: dict[Hashable, list[_Cluster]] = {}
    seen: dict[tuple[Hashable, str], int] = {}
    rows = [[-1] * len(turns) for turns, _ in checked]
    opened = 0
    for row, k in order:
        turns, group = checked[row]
        text = turns[k]
        if text is None:
            continue
        if (group, text) not in seen:
            mine = clusters.setdefault(group, [])
            cluster_id = next((cluster.number for cluster in mine if cluster.takes(text, threshold)), None)
            if cluster_id is None:
                cluster_id, opened = opened, opened + 1
                mine.append(_Cluster(cluster_id, text, autojunk))
            seen[group, text] = cluster_id
        rows[row][k] = seen[group, text]
    return _table(rows, columns)


class _Cluster:
    """A cluster's first member, prepared for comparisons."""

    def __init__(self, number: int, text: str, autojunk: bool) -> None:
        self.number, self.length = number, len(text)
        self.matcher = difflib.SequenceMatcher(None, b=text, autojunk=autojunk)
        self.places: dict[str, int] = {}  # character: its places as bits
        for place, character in enumerate(text):
            self.places[character] = self.places.get(character, 0) | 1 << place

    def takes(self, text: str, threshold: float) -> bool:
        """The ratio is at least the threshold. Cheap upper bounds of the ratio come first."""
        self.matcher.set_seq1(text)
        bounds = self.matcher.real_quick_ratio, self.matcher.quick_ratio, lambda: self._bound(text)
        return all(bound() >= threshold for bound in bounds) and self.matcher.ratio() >= threshold

    def _bound(self, text: str) -> float:
        """Matching blocks are a common subsequence, whose greatest length takes one pass over the text."""
        all_bits = (1 << self.length) - 1
        unmatched = all_bits
        for character in text:
            hit = unmatched & self.places.get(character, 0)
            unmatched = (unmatched + hit | unmatched - hit) & all_bits
        length = self.length + len(text)
        return 2 * (self.length - unmatched.bit_count()) / length if length else 1.0


def _checked(
    states: Sequence[Sequence[Any]], group_B: Sequence[Hashable]
) -> list[tuple[Sequence[Any], Hashable]]:
    groups = group_B.tolist() if hasattr(group_B, "tolist") else list(group_B)
    if len(groups) != len(states):
        raise ValueError(f"group_B has {len(groups)} entries; expected {len(states)}, as states has rows")
    for row, turns in enumerate(states):
        if isinstance(turns, str) or not isinstance(turns, Sequence):
            raise TypeError(
                f"states row {row} is a {type(turns).__name__}; expected a list with a state per turn"
            )
    return list(zip(states, groups, strict=True))


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


def _table(rows: Sequence[Sequence[int]], columns: int | None) -> torch.Tensor:
    longest = max((len(row) for row in rows), default=0)
    columns = longest if columns is None else columns
    if columns < longest:
        raise ValueError(f"columns={columns}: expected at least {longest}, the turns of the longest row")
    padded = [list(row) + [-1] * (columns - len(row)) for row in rows]
    return torch.tensor(padded, dtype=torch.long).view(len(rows), columns)
