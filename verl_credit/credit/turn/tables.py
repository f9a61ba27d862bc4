"""What every turn mode reads: checked float64 tables, the constants, and the two moves that modes share."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from verl_credit.credit.checks import first_row
from verl_credit.credit.groups import z_score, z_score_per_turn
from verl_credit.credit.outcome.maxrl import maxrl
from verl_credit.credit.outcome.outcome import grpo
from verl_credit.credit.outcome.reinforce_pp import reinforce_pp

NAMED_OPERATORS = {"maxrl": maxrl, "reinforce_pp": reinforce_pp}


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
    known_gains_B: torch.Tensor
    """False for a row that lost a gain: what it gained in all is not known."""
    gain_scale: float = 1.0
    outcome_scale: float = 1.0
    outcome_operator: str | Callable[..., torch.Tensor] = "grpo"

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
        """outcome_scale R, R being the outcome operator's advantage, 0 for rows that do not count."""
        return self.outcome_scale * self._outcome_advantage()

    def _outcome_advantage(self) -> torch.Tensor:
        if self.outcome_operator != "grpo":
            named = isinstance(self.outcome_operator, str)
            operator = NAMED_OPERATORS[self.outcome_operator] if named else self.outcome_operator
            advantage_B = operator(self.outcome_B, self.group_B, row_valid_B=self.valid_B)
            return _checked(advantage_B, self.valid_B)
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
        return z_score_per_turn(
            values_B_K,
            self.has_gain_B_K,
            self.group_B,
            norm_by_std=self.norm_by_std,
            ddof=self.ddof,
            variance_floor=self.variance_floor,
            eps=self.eps,
        )

    def backward(
        self, last_B: torch.Tensor, step: Callable[[int, torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        """out[:, k] = step(k, next) where turn k has a gain, else next; next starts as `last_B`."""
        columns, next_B = [], last_B
        for k in reversed(range(self.gain_B_K.shape[1])):
            next_B = torch.where(self.has_gain_B_K[:, k], step(k, next_B), next_B)
            columns.append(next_B)
        return torch.stack(columns[::-1], dim=1) if columns else torch.zeros_like(self.gain_B_K)

    def discounted(
        self, z_B_K: torch.Tensor, outcome_B: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """A_k = gain_scale z_k + gamma A_{k+1}, A_answer = outcome_B, clip scale 1."""
        z_B_K = self.gain_scale * z_B_K
        advantage_B_K = self.backward(outcome_B, lambda k, next_B: z_B_K[:, k] + self.gamma * next_B)
        return advantage_B_K, outcome_B, self.ones()

    def ones(self) -> torch.Tensor:
        return torch.ones_like(self.gain_B_K)


def _checked(advantage_B: torch.Tensor, valid_B: torch.Tensor) -> torch.Tensor:
    """What an outcome operator returned, float64, 0 for rows that do not count."""
    if not isinstance(advantage_B, torch.Tensor) or advantage_B.shape != valid_B.shape:
        got = (
            tuple(advantage_B.shape) if isinstance(advantage_B, torch.Tensor) else type(advantage_B).__name__
        )
        raise ValueError(
            f"outcome_operator returned {got}; expected a tensor of shape {tuple(valid_B.shape)}"
        )
    bad_B = valid_B & ~advantage_B.isfinite()
    if bad_B.any():
        row = first_row(bad_B)
        raise ValueError(
            f"outcome_operator returned {float(advantage_B[row])} for row {row}; expected finite numbers"
        )
    return torch.where(valid_B, advantage_B.detach().to(torch.float64), 0.0)
