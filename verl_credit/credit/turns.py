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
    ids_N = ids_B_T[mask_B_T].long()  # the policy tokens of all rows, one row after the other
    n_policy_B = mask_B_T.sum(dim=1)
    opens_B = n_policy_B.cumsum(0) - n_policy_B  # where in N a row begins
    opens_N = opens_B[n_policy_B > 0]
    step_N = ids_N.diff(prepend=ids_N[:1])
    wrong_N = (step_N != 0) & (step_N != 1)
    wrong_N[opens_N] = ids_N[opens_N] != 0  # a row's first token is compared with 0, not with another row
    if wrong_N.any():
        _refuse_order(ids_B_T, mask_B_T, int(wrong_N.nonzero()[0]), opens_B)

    n_turns_B = torch.zeros_like(n_policy_B)
    n_turns_B[n_policy_B > 0] = ids_N[(opens_B + n_policy_B)[n_policy_B > 0] - 1] + 1
    rows, columns = len(n_turns_B), max(1, int(n_turns_B.max())) if len(n_turns_B) else 1
    row_N = torch.repeat_interleave(torch.arange(rows, device=ids_N.device), n_policy_B)
    n_tokens = torch.bincount(row_N * columns + ids_N, minlength=rows * columns)
    return TurnTable(n_turns_B, n_tokens.view(rows, columns))


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
    if ids_B_T.numel() == 0:
        return values_B_K1.new_full(ids_B_T.shape, fill)
    ids_B_T = torch.where(mask_B_T, ids_B_T, 0).long()
    lowest, highest = ids_B_T.aminmax()
    if lowest < 0 or highest >= columns:
        row = first_row((ids_B_T < 0) | (ids_B_T >= columns))
        bad = next(k for k in ids_B_T[row].tolist() if not 0 <= k < columns)
        raise ValueError(
            f"turn_ids_B_T row {row} holds turn {bad} on a policy token, "
            f"but values_B_K1 has columns for turns 0 to {columns - 1}"
        )
    return torch.where(mask_B_T, values_B_K1.gather(1, ids_B_T), fill)


def _checked(ids_B_T: torch.Tensor, mask_B_T: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    if ids_B_T.dim() != 2:
        raise ValueError(f"turn_ids_B_T has shape {tuple(ids_B_T.shape)}; expected rows x response tokens")
    if ids_B_T.dtype.is_floating_point or ids_B_T.dtype == torch.bool:
        raise TypeError(f"turn_ids_B_T has dtype {ids_B_T.dtype}; turn ids are integers")
    check_shape("response_mask_B_T", mask_B_T, ids_B_T.shape, "turn_ids_B_T")
    return ids_B_T, as_bool("response_mask_B_T", mask_B_T)


def _refuse_order(ids_B_T: torch.Tensor, mask_B_T: torch.Tensor, n: int, opens_B: torch.Tensor) -> None:
    """Say where in its row the n-th policy token of the batch stands, and what its id should be."""
    row, position = mask_B_T.nonzero()[n].tolist()
    right = "0 (the first policy token opens turn 0)"
    if n > int(opens_B[row]):
        before = int(ids_B_T[mask_B_T][n - 1])
        right = f"{before} or {before + 1}"
    found = int(ids_B_T[row, position])
    raise ValueError(
        f"turn_ids_B_T row {row}, policy token at position {position}: turn {found}; expected {right}"
    )
