"""Baselines b_j of the score term. Any function of the state s_j leaves X unbiased; a good one lowers its variance.

Each baseline predicts the *residual* R_j = G_j - H_j, the return without the present entropy, which s_j determines.
A prediction must not know the token that it is subtracted from: here no prediction for a rollout uses any rollout of the
same prompt. The founding plan updated its mean with a micro-batch and then subtracted it from that micro-batch, which
shrinks a residual that stands alone at its place to a tenth (defects E1, E2).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from verl_credit.study.probe.settings import BaselineSettings


@dataclass(frozen=True)
class Targets:
    """The residuals that a baseline is fitted to. ``prompt_B`` counts from 0; only the regression reads features."""

    residual_B_T: torch.Tensor
    written_B_T: torch.Tensor
    prompt_B: torch.Tensor
    features_B_T_F: torch.Tensor | None = None

    @property
    def n_prompts(self) -> int:
        return int(self.prompt_B.max()) + 1


def baseline(targets: Targets, settings: BaselineSettings) -> torch.Tensor:
    """Predicted residuals [B, T] float64, 0 outside the policy's tokens.

    ``none`` predicts 0, so that b_j = H_j; ``constant`` one number for all places; ``residual_mu`` one number per place.
    """
    written_B_T = targets.written_B_T
    if settings.mode == "none":
        return torch.zeros_like(targets.residual_B_T)
    if settings.mode == "regression":
        predicted_B_T = _regression(targets, settings)
    else:
        one = torch.zeros_like(written_B_T, dtype=torch.long)
        place_B_T = one if settings.mode == "constant" else places(written_B_T)
        if settings.fit == "leave_one_out":
            predicted_B_T = _leave_one_out(targets, place_B_T)
        else:
            predicted_B_T = _previous(targets, place_B_T, settings.ema_decay)
    return torch.where(written_B_T, predicted_B_T, 0.0)


def places(written_B_T: torch.Tensor) -> torch.Tensor:
    """The number of each token among the policy's own tokens of its row: 0, 1, ...; observations do not count. [B, T]"""
    return (written_B_T.long().cumsum(1) - 1).clamp_min(0)


def _sums(targets: Targets, place_B_T: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Sum of residuals and number of tokens by prompt and place, [prompts, places]."""
    width = int(place_B_T.max()) + 1
    row_N, column_N = targets.written_B_T.nonzero(as_tuple=True)
    at_N = targets.prompt_B[row_N] * width + place_B_T[row_N, column_N]
    summed = torch.zeros(targets.n_prompts * width, dtype=torch.float64)
    counted = summed.clone()
    summed.index_add_(0, at_N, targets.residual_B_T[row_N, column_N].double())
    counted.index_add_(0, at_N, torch.ones(len(at_N), dtype=torch.float64))
    return summed.view(-1, width), counted.view(-1, width)


def _leave_one_out(targets: Targets, place_B_T: torch.Tensor) -> torch.Tensor:
    """The mean over all other prompts at this place; where no other prompt gets so far, 0."""
    summed_P_J, counted_P_J = _sums(targets, place_B_T)
    others_P_J, tokens_P_J = summed_P_J.sum(0) - summed_P_J, counted_P_J.sum(0) - counted_P_J
    mean_P_J = torch.where(tokens_P_J > 0, others_P_J / tokens_P_J.clamp_min(1), 0.0)
    return mean_P_J[targets.prompt_B[:, None], place_B_T]


def _previous(targets: Targets, place_B_T: torch.Tensor, decay: float) -> torch.Tensor:
    """The EMA over the prompts before this one. A place's first mean is taken whole; places not reached keep theirs (E3)."""
    summed_P_J, counted_P_J = _sums(targets, place_B_T)
    mu_J, known_J = torch.zeros(summed_P_J.shape[1], dtype=torch.float64), torch.zeros(summed_P_J.shape[1])
    before = []
    for summed_J, counted_J in zip(summed_P_J, counted_P_J, strict=True):
        before.append(mu_J)
        reached_J, mean_J = counted_J > 0, summed_J / counted_J.clamp_min(1)
        moved_J = decay * mu_J + (1 - decay) * mean_J
        mu_J = torch.where(reached_J, torch.where(known_J > 0, moved_J, mean_J), mu_J)
        known_J = torch.maximum(known_J, reached_J.to(known_J))
    return torch.stack(before)[targets.prompt_B[:, None], place_B_T]


def _regression(targets: Targets, settings: BaselineSettings) -> torch.Tensor:
    """Ridge on the standardised state features with an intercept that is not shrunk, fitted to the other folds' prompts.

    β = (ΦᵀΦ + n λ I)⁻¹ Φᵀ(R - mean R), standardised by the rows of the fit. Prompt p is in fold p mod ``folds``.
    Source: phase 3b of the founding plan, which fitted and predicted the same micro-batch, without an intercept.
    """
    if targets.features_B_T_F is None:
        raise ValueError("estimator.baseline.mode=regression needs the features of the states")
    folds = min(settings.folds, targets.n_prompts)
    predicted_B_T = torch.zeros_like(targets.residual_B_T, dtype=torch.float64)
    if folds < 2:
        return predicted_B_T  # no other prompt to fit
    fold_B = targets.prompt_B % folds
    for number in range(folds):
        fitted_B_T = targets.written_B_T & (fold_B != number)[:, None]
        wanted_B_T = targets.written_B_T & (fold_B == number)[:, None]
        x_N_F, y_N = targets.features_B_T_F[fitted_B_T].double(), targets.residual_B_T[fitted_B_T].double()
        if not len(y_N):
            continue
        centre_F, scale_F = x_N_F.mean(0), x_N_F.std(0, correction=0)
        scale_F = torch.where(
            scale_F > 1e-12, scale_F, torch.inf
        )  # no weight for a feature that does not vary
        phi_N_F, mean = (x_N_F - centre_F) / scale_F, y_N.mean()
        ridge = settings.ridge_lambda * len(y_N) * torch.eye(phi_N_F.shape[1], dtype=torch.float64)
        beta_F = torch.linalg.solve(phi_N_F.T @ phi_N_F + ridge, phi_N_F.T @ (y_N - mean))
        wanted_N_F = (targets.features_B_T_F[wanted_B_T].double() - centre_F) / scale_F
        predicted_B_T[wanted_B_T] = mean + wanted_N_F @ beta_F
    return predicted_B_T
