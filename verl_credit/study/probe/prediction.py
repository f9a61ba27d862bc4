"""δH₁ = η X · v, the change of entropy to first order, from directional derivatives, with its standard error."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from verl_credit.credit.entropy_change import jackknife, left_out
from verl_credit.credit.entropy_gradient import EntropyGradient, Tokens, mean_by_prompt


@dataclass(frozen=True)
class Prediction:
    """``slope`` is δH₁ / η: multiply by the learning rate. The standard error is over E, given the update."""

    slope: float
    jackknife_se: float
    entropy: float
    """H at the sampling parameters, by the same estimator and in the same unit"""

    def at(self, eta: float) -> tuple[float, float]:
        """(δH₁, jackknife standard error) at this learning rate."""
        return eta * self.slope, abs(eta) * self.jackknife_se


def predict(gradient: EntropyGradient, derivative: Tokens) -> Prediction:
    """The prediction from means over prompts: N' of the numerator's, D' of the length's derivative, F of the entropy, T
    of the length.

        δH₁ / η = (N' - (F / T) D') / T

    ``jackknife_se``: prompts left out one by one, nan for fewer than two prompts.
    """
    columns = [
        gradient.numerator.along(derivative),
        gradient.length.along(derivative),
        gradient.entropy_B,
        gradient.length_B,
    ]
    table_P_4 = torch.stack([mean_by_prompt(column, gradient.prompt_B) for column in columns], 1)
    slope = _ratio(table_P_4.mean(0))
    entropy = float(table_P_4[:, 2].mean() / table_P_4[:, 3].mean())
    return Prediction(float(slope), jackknife(_ratio(left_out(table_P_4))), entropy)


def _ratio(means: torch.Tensor) -> torch.Tensor:
    n, d, f, t = means.unbind(-1)
    return (n - f / t * d) / t


def log_log_slope(etas: list[float], changes: list[float]) -> float:
    """The least-squares slope of log |ΔH| on log η: 1 where the change is linear. No change may be 0."""
    x, y = (torch.tensor(v, dtype=torch.float64).abs().log() for v in (etas, changes))
    return float(((x - x.mean()) * (y - y.mean())).sum() / (x - x.mean()).square().sum())
