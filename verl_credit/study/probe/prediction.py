"""δH₁ = η X · v per unit of learning rate, from directional derivatives, with its standard errors."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from verl_credit.study.probe.entropy_gradient import EntropyGradient
from verl_credit.study.probe.policy import Tokens
from verl_credit.study.probe.returns import mean_by_prompt


@dataclass(frozen=True)
class Prediction:
    """``slope`` is δH₁ / η: multiply by the learning rate. Standard errors are over E, given the update."""

    slope: float
    conditional_se: float
    jackknife_se: float
    entropy: float
    """H at the sampling parameters, by the same estimator and in the same unit"""

    def at(self, eta: float) -> tuple[float, float]:
        """(δH₁, jackknife standard error) at this learning rate."""
        return eta * self.slope, abs(eta) * self.jackknife_se


def predict(gradient: EntropyGradient, derivative: Tokens) -> Prediction:
    """With means over prompts N' of the numerator's, D' of the length's derivative, F of the entropy and T of the length:

        δH₁ / η = (N' - (F / T) D') / T        (per token)        or N' (T = 1, D' = 0)

    ``conditional_se``: sqrt(sample variance over prompts / prompts) of the linearised contributions, which for T = 1 are the
    s_n = X_n · v of the notes. ``jackknife_se``: prompts left out one by one. Both are nan for fewer than two prompts.
    """
    P = gradient.n_prompts
    columns = [
        gradient.numerator.along(derivative),
        torch.zeros_like(gradient.entropy_B)
        if gradient.length is None
        else gradient.length.along(derivative),
        gradient.entropy_B,
        gradient.length_B,
    ]
    table_P_4 = torch.stack([mean_by_prompt(column, gradient.prompt_B, P) for column in columns], 1)
    slope = _ratio(table_P_4.mean(0))
    entropy = float(table_P_4[:, 2].mean() / table_P_4[:, 3].mean())
    if P < 2:
        return Prediction(float(slope), float("nan"), float("nan"), entropy)
    contribution_P = _contributions(table_P_4, slope)
    left_out_P = _ratio((table_P_4.sum(0) - table_P_4) / (P - 1))
    jackknife = ((P - 1) / P * (left_out_P - left_out_P.mean()).square().sum()).sqrt()
    return Prediction(float(slope), float(contribution_P.std() / P**0.5), float(jackknife), entropy)


def _ratio(means: torch.Tensor) -> torch.Tensor:
    n, d, f, t = means.unbind(-1)
    return (n - f / t * d) / t


def _contributions(table_P_4: torch.Tensor, slope: torch.Tensor) -> torch.Tensor:
    """The influence of each prompt on the ratio (delta method), up to a constant."""
    n_P, d_P, f_P, t_P = table_P_4.unbind(-1)
    _, d, f, t = table_P_4.mean(0)
    return (n_P - f / t * d_P - d * (f_P / t - f * t_P / t**2)) / t - slope * t_P / t


@dataclass(frozen=True)
class UStatistic:
    """δH₁ / η of one batch that serves as both E and U."""

    value: float
    plug_in_se: float
    jackknife_se: float


def u_statistic(
    x_dot_mean_y_P: torch.Tensor, mean_x_dot_y_P: torch.Tensor, x_dot_y_P: torch.Tensor
) -> UStatistic:
    """The cross-prompt U-statistic of X · Y, from the prompts' own products. All [P] float64.

        U = 1 / (P (P - 1)) Σ_{n != m} X_n · Y_m,    r_n = mean over m != n of (X_n · Y_m + X_m · Y_n) / 2

    A prompt's X and Y share their rollouts, so its own product is left out. Plug-in: Var = (4 / P) ζ₁ with
    ζ₁ = Σ (r_n - U)² / (P - 1); the released code has P / 4 times that ζ₁ (defect E11). Jackknife:
    U_(-n) = (P U - 2 r_n) / (P - 2). Needs P >= 3: ValueError.
    """
    P = len(x_dot_y_P)
    if P < 3:
        raise ValueError(f"the U-statistic's standard error needs at least 3 prompts, got {P}")
    total_P = P * (x_dot_mean_y_P + mean_x_dot_y_P) / 2
    r_P = (total_P - x_dot_y_P) / (P - 1)
    value = r_P.mean()
    plug_in = (4 / P * (r_P - value).square().sum() / (P - 1)).sqrt()
    left_out_P = (P * value - 2 * r_P) / (P - 2)
    jackknife = ((P - 1) / P * (left_out_P - left_out_P.mean()).square().sum()).sqrt()
    return UStatistic(float(value), float(plug_in), float(jackknife))
