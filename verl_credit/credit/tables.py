"""What every turn mode reads: checked float64 tables, the constants, and the two moves that modes share."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from verl_credit.credit.groups import z_score
from verl_credit.credit.outcome import grpo


@dataclass(frozen=True)
class Tables:
    """Inputs of a mode. Shapes: B rows, K tool turns. `has_gain_B_K` is False in every row that is not valid."""

    outcome_B: torch.Tensor
    gain_B_K: torch.Tensor
    has_gain_B_K: torch.Tensor
    group_B: torch.Tensor
    valid_B: torch.Tensor
    gamma: float
    alpha: float
    clip_beta: float
    norm_by_std: bool
    ddof: int
    variance_floor: float
    eps: float
    outcome_weight: float
    outcome_gamma_power: int
    sigma_floor: float

    def z_score(self, values_N: torch.Tensor, group_N: torch.Tensor, member_N: torch.Tensor) -> torch.Tensor:
        return z_score(
            values_N,
            group_N,
            member_N=member_N,
            norm_by_std=self.norm_by_std,
            ddof=self.ddof,
            variance_floor=self.variance_floor,
            eps=self.eps,
        )

    def outcome_advantage(self) -> torch.Tensor:
        return grpo(
            self.outcome_B,
            self.group_B,
            norm_by_std=self.norm_by_std,
            ddof=self.ddof,
            variance_floor=self.variance_floor,
            eps=self.eps,
            row_valid_B=self.valid_B,
        )

    def z_score_per_turn(self, values_B_K: torch.Tensor) -> torch.Tensor:
        """Compared with the same tool turn of the same prompt's other trajectories."""
        turns = values_B_K.shape[1]
        column_K = torch.arange(turns, device=values_B_K.device)
        group_B_K = self.group_B[:, None] * turns + column_K
        z = self.z_score(values_B_K.flatten(), group_B_K.flatten(), self.has_gain_B_K.flatten())
        return z.view_as(values_B_K)

    def backward(
        self, last_B: torch.Tensor, step: Callable[[int, torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        """out[:, k] = step(k, next) where turn k has a gain, else next; next starts as `last_B`."""
        columns, next_B = [], last_B
        for k in reversed(range(self.gain_B_K.shape[1])):
            next_B = torch.where(self.has_gain_B_K[:, k], step(k, next_B), next_B)
            columns.append(next_B)
        return torch.stack(columns[::-1], dim=1) if columns else torch.zeros_like(self.gain_B_K)

    def ones(self) -> torch.Tensor:
        return torch.ones_like(self.gain_B_K)
