"""Turns: from per-token turn ids to per-turn tables and back.

A row's policy tokens have the ids 0, 1, ..., n in order: n tool turns and then the answer turn, whose id is
the number of tool turns. Ids are read where the response mask is 1 and nowhere else.
"""

from __future__ import annotations

from dataclasses import dataclass

from verl_credit.credit.arguments import check_shape, checked_ids
from verl_credit.credit.groups import row_chunks
from verl_credit.lazy import torch

NAMES = "turn_ids_B_T", "response_mask_B_T", "turn ids"


@dataclass(frozen=True)
class TurnTable:
    """The turns of a batch, counted from their ids per row and per turn (column K is the widest row's answer turn)."""

    n_turns_B: torch.Tensor  # answer turn included; 0 for a row without policy tokens
    n_tokens_B_K1: torch.Tensor  # policy tokens of each turn; K1 = the largest n_turns (at least 1)

    @property
    def n_tool_turns_B(self) -> torch.Tensor:
        return (self.n_turns_B - 1).clamp(min=0)

    @property
    def tool_turn_mask_B_K(self) -> torch.Tensor:
        """True for the tool turns that a row has."""
        columns_K = torch.arange(self.n_tokens_B_K1.shape[1] - 1, device=self.n_turns_B.device)
        return columns_K < self.n_tool_turns_B[:, None]


def turn_table(turn_ids_B_T: torch.Tensor, response_mask_B_T: torch.Tensor) -> TurnTable:
    """Count turns and their tokens, after checking the ids.

    Over the policy tokens of a row (mask 1) the ids start at 0, never go backwards and skip none; whatever
    stands where the mask is 0 is ignored.
    Raises ValueError that names the row and the position.
    """
    ids_B_T, mask_B_T = checked_ids(turn_ids_B_T, response_mask_B_T, *NAMES)
    row_R, place_R, id_R, n_tokens_R = _runs(ids_B_T, mask_B_T)
    opens_R = row_R.diff(prepend=row_R.new_full((1,), -1)) != 0
    step_R = torch.where(opens_R, id_R, id_R.diff(prepend=id_R[:1]))
    wrong_R = (step_R != 0) & (opens_R | (step_R != 1))
    if wrong_R.any():
        first = int(wrong_R.nonzero()[0])
        before = int(id_R[first - 1])
        right = "0 (the first policy token opens turn 0)" if opens_R[first] else f"{before} or {before + 1}"
        raise ValueError(
            f"turn_ids_B_T row {row_R[first]}, policy token at position {place_R[first]}: turn {id_R[first]}; "
            f"expected {right}"
        )

    rows = ids_B_T.shape[0]
    n_turns_B = id_R.new_zeros(rows).scatter_reduce(0, row_R, id_R + 1, "amax")
    columns = max(1, int(n_turns_B.max())) if rows else 1
    n_tokens = id_R.new_zeros(rows * columns).index_add(0, row_R * columns + id_R, n_tokens_R)
    return TurnTable(n_turns_B, n_tokens.view(rows, columns))


def _runs(ids_B_T: torch.Tensor, mask_B_T: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """(row, place, id, tokens) of every stretch of policy tokens with one id, in order: few where T is many."""
    rows, width = ids_B_T.shape
    ids_N, mask_N = ids_B_T.reshape(-1), mask_B_T.reshape(-1)
    if ids_N.numel() == 0:
        return (ids_N.long(),) * 4
    begins_N = torch.ones_like(mask_N)
    begins_N[1:] = (mask_N[1:] != mask_N[:-1]) | (mask_N[1:] & (ids_N[1:] != ids_N[:-1]))
    begins_N[::width] = True
    at_R = begins_N.nonzero().flatten()
    n_tokens_R = at_R.diff(append=at_R.new_full((1,), rows * width))
    policy_R = mask_N[at_R]
    at_R, n_tokens_R = at_R[policy_R], n_tokens_R[policy_R]
    return at_R // width, at_R % width, ids_N[at_R].long(), n_tokens_R


def spread(
    values_B_K1: torch.Tensor,
    turn_ids_B_T: torch.Tensor,
    response_mask_B_T: torch.Tensor,
    *,
    fill: float = 0.0,
) -> torch.Tensor:
    """Give every policy token its turn's value: out[b, t] = values[b, turn_ids[b, t]], `fill` elsewhere.

    `values_B_K1` has a column for each turn, the answer turn's value standing at column n_turns - 1 of its
    row (`TurnCredit.advantage_B_K1` is laid out so). Keeps the dtype of the values.
    Raises ValueError where a policy token's id has no column.
    """
    ids_B_T, mask_B_T = checked_ids(turn_ids_B_T, response_mask_B_T, *NAMES)
    check_shape("values_B_K1", values_B_K1, (len(ids_B_T), *values_B_K1.shape[1:]), "one row per trajectory")
    if ids_B_T.numel() == 0:
        return values_B_K1.new_full(ids_B_T.shape, fill)
    out_B_T = values_B_K1.new_empty(ids_B_T.shape)
    for rows in row_chunks(ids_B_T):
        ids_C_T = torch.where(mask_B_T[rows], ids_B_T[rows], 0).long()
        (lowest, highest), columns = ids_C_T.aminmax(), values_B_K1.shape[1]
        if lowest < 0 or highest >= columns:
            row, place = ((ids_C_T < 0) | (ids_C_T >= columns)).nonzero()[0].tolist()
            raise ValueError(
                f"turn_ids_B_T row {rows.start + row} holds turn {ids_C_T[row, place]} on a policy token, but values_B_K1 "
                f"has columns for turns 0 to {columns - 1}"
            )
        out_B_T[rows] = values_B_K1[rows].gather(1, ids_C_T).where(mask_B_T[rows], fill)
    return out_B_T
