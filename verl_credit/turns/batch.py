"""The turns of a step's rows, as tensors."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class TurnBatch:
    """B rows (padding rows included), T response tokens of the longest row."""

    prompt_ids: list[list[int]]
    response_ids: list[list[int]]
    turn_ids_B_T: torch.Tensor
    response_mask_B_T: torch.Tensor
    records: list[dict]
    scores: list[dict]
    """The reward function's other values (em, f1, format_ok)."""
    ground_truths: list
    extra_infos: list[dict]
    """What the data set says of the row (question, index, ...)."""
    columns: list[dict]
    """The data file's other columns, those that a turn signal reads."""
    is_padding: list[bool]
    row_valid_B: torch.Tensor
    """False for padding rows (copies of real rows) and rows lost to a tool fault."""
    n_turns_B: torch.Tensor
    turn_rewards: list[list[float | None]]
    """Per row and tool turn what its calls earned, None where no reward is known; [] for a padding row."""
