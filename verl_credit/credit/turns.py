"""Turns: from per-token turn ids to per-turn tables and back.

A row's policy tokens carry the ids 0, 1, ..., n in order: n tool turns and then the answer turn, whose id is
the number of tool turns. Ids are read where the response mask is 1 and nowhere else.
"""

from dataclasses import dataclass

import torch

from verl_credit.credit.checks import as_bool, check_shape, first_row


@dataclass(frozen=True)
class TurnTable:
    """What the turn ids of a batch say, per row and per turn (column K is the widest row's answer turn)."""

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
    ids_B_T, mask_B_T = _checked(turn_ids_B_T, response_mask_B_T)
    rows = ids_B_T.shape[0]
    if ids_B_T.numel() == 0:
        return TurnTable(ids_B_T.new_zeros(rows), ids_B_T.new_zeros(rows, 1))
    _check_order(ids_B_T, mask_B_T)
    n_turns_B = torch.where(mask_B_T, ids_B_T + 1, 0).amax(dim=1)
    columns = max(1, int(n_turns_B.max()))
    n_tokens_B_K1 = ids_B_T.new_zeros(rows, columns)
    n_tokens_B_K1.scatter_add_(1, torch.where(mask_B_T, ids_B_T, 0), mask_B_T.to(ids_B_T.dtype))
    return TurnTable(n_turns_B, n_tokens_B_K1)


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
    ids_B_T, mask_B_T = _checked(turn_ids_B_T, response_mask_B_T)
    check_shape(
        "values_B_K1", values_B_K1, (ids_B_T.shape[0], *values_B_K1.shape[1:]), "one row per trajectory"
    )
    columns = values_B_K1.shape[1]
    outside = mask_B_T & ((ids_B_T < 0) | (ids_B_T >= columns))
    if outside.any():
        row = first_row(outside)
        bad = int(ids_B_T[row][outside[row]][0])
        raise ValueError(
            f"turn_ids_B_T row {row} holds turn {bad} on a policy token, "
            f"but values_B_K1 has columns for turns 0 to {columns - 1}"
        )
    if ids_B_T.numel() == 0:
        return values_B_K1.new_full(ids_B_T.shape, fill)
    values_B_T = values_B_K1.gather(1, torch.where(mask_B_T, ids_B_T, 0))
    return torch.where(mask_B_T, values_B_T, torch.full_like(values_B_T, fill))


def _checked(ids_B_T: torch.Tensor, mask_B_T: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    if ids_B_T.dim() != 2:
        raise ValueError(f"turn_ids_B_T has shape {tuple(ids_B_T.shape)}; expected rows x response tokens")
    if ids_B_T.dtype.is_floating_point or ids_B_T.dtype == torch.bool:
        raise TypeError(f"turn_ids_B_T has dtype {ids_B_T.dtype}; turn ids are integers")
    check_shape("response_mask_B_T", mask_B_T, ids_B_T.shape, "turn_ids_B_T")
    return ids_B_T.long(), as_bool("response_mask_B_T", mask_B_T)


def _check_order(ids_B_T: torch.Tensor, mask_B_T: torch.Tensor) -> None:
    """Each policy id must equal the largest id before it in its row, or be one more (-1 before the first)."""
    seen_B_T = torch.where(mask_B_T, ids_B_T, -1).cummax(dim=1).values
    before_B_T = torch.cat([torch.full_like(seen_B_T[:, :1], -1), seen_B_T[:, :-1]], dim=1)
    step_B_T = ids_B_T - before_B_T
    first_token_B_T = before_B_T < 0
    wrong = mask_B_T & ((step_B_T > 1) | (step_B_T < 0) | (first_token_B_T & (step_B_T != 1)))
    if not wrong.any():
        return
    row = first_row(wrong)
    position = int(wrong[row].nonzero()[0])
    found, before = int(ids_B_T[row, position]), int(before_B_T[row, position])
    right = "0 (the first policy token opens turn 0)" if before < 0 else f"{before} or {before + 1}"
    raise ValueError(
        f"turn_ids_B_T row {row}, policy token at position {position}: turn {found}; expected {right}"
    )
