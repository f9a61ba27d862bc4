"""Converts between padded tensors and one prompt's lists."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch


def groups_of(group_B: torch.Tensor, row_valid_B: torch.Tensor) -> Iterator[list[int]]:
    """Valid rows of each group, in the order of the groups' first rows."""
    rows: dict[int, list[int]] = {}
    for row, (group, valid) in enumerate(zip(group_B.tolist(), row_valid_B.tolist(), strict=True)):
        if valid:
            rows.setdefault(group, []).append(row)
    yield from rows.values()


def as_lists(values_B_T: torch.Tensor | None, mask_B_T: torch.Tensor, rows: list[int]) -> list[list]:
    """The policy's own tokens of the given rows, masks as 0 and 1; empty lists without values."""
    if values_B_T is None:
        return [[] for _ in rows]
    values_B_T = values_B_T.int() if values_B_T.dtype == torch.bool else values_B_T
    return [values_B_T[row][mask_B_T[row]].tolist() for row in rows]


def turn_lists(
    reward_B_K: torch.Tensor, mask_B_K: torch.Tensor, turn_ids_B_T: torch.Tensor, rows: list[int]
) -> list[list[float | None]]:
    """A reward or None per tool turn of the given rows; the ids are -1 on tokens that the policy did not write."""
    known_B_K = mask_B_K & reward_B_K.isfinite()
    lists = []
    for row in rows:
        n_tool_turns = max(0, int(turn_ids_B_T[row].max())) if turn_ids_B_T.shape[1] else 0
        pairs = zip(reward_B_K[row].tolist(), known_B_K[row].tolist(), strict=True)
        rewards_K = [reward if known else None for reward, known in pairs]
        lists.append((rewards_K + [None] * n_tool_turns)[:n_tool_turns])
    return lists


def run_by_rows(
    call: Callable[[list[int]], Any],
    groups: Iterable[list[int]],
    out_B_T: torch.Tensor,
    mask_B_T: torch.Tensor,
    name: str,
) -> dict[str, float]:
    """Calls an operator once for each group of rows and writes its lists to their policy tokens.

    The operator returns a list per row, or an object with ``token_advs`` and perhaps ``extra_metrics``. Returns the mean of
    each metric over the groups that report it.
    """
    metrics: list[dict[str, float]] = []
    for rows in groups:
        output = call(rows)
        write_back(out_B_T, mask_B_T, rows, getattr(output, "token_advs", output), name)
        metrics.append(getattr(output, "extra_metrics", {}))
    reported = {name: [row[name] for row in metrics if name in row] for name in sorted(set().union(*metrics))}
    return {name: sum(values) / len(values) for name, values in reported.items()}


def write_back(
    out_B_T: torch.Tensor, mask_B_T: torch.Tensor, rows: list[int], lists: object, name: str
) -> None:
    """Check an operator's result for the given rows and write it to their policy tokens."""
    if isinstance(lists, torch.Tensor):
        lists = lists.tolist()
    if not isinstance(lists, list | tuple) or len(lists) != len(rows):
        got = f"{len(lists)} lists" if isinstance(lists, list | tuple) else type(lists).__name__
        raise ValueError(
            f"{name} returned {got} for a group of {len(rows)} completions; expected one list each"
        )
    for row, values in zip(rows, lists, strict=True):
        try:
            values_t = torch.as_tensor(values, dtype=torch.float64)
        except (TypeError, ValueError, RuntimeError):
            values_t = None
        if values_t is None or values_t.dim() != 1:
            raise ValueError(f"{name} returned {values!r} for row {row}; expected a list of numbers")
        n = int(mask_B_T[row].sum())
        if len(values_t) != n:
            raise ValueError(
                f"{name} returned {len(values_t)} values for row {row}, which has {n} policy tokens"
            )
        bad_t = ~(values_t.abs() <= torch.finfo(out_B_T.dtype).max)
        if bad_t.any():
            raise ValueError(
                f"{name} returned {float(values_t[bad_t][0])} for row {row}; expected finite numbers"
            )
        out_B_T[row, mask_B_T[row]] = values_t.to(out_B_T)
