"""The change of entropy itself: rollouts of θ, reweighted to θ + δθ (self-normalised importance sampling)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from verl_credit.study.probe.policy import Tokens
from verl_credit.study.probe.returns import mean_by_prompt, prompt_numbers
from verl_credit.study.probe.settings import PER_SEQUENCE_MEAN, PER_TOKEN

LOG_WEIGHT_LIMIT = 10.0


@dataclass(frozen=True)
class Change:
    """``change`` = H(θ + δθ) - H(θ) in the unit of the estimand; ``clipped``: share of log-weights beyond the limit."""

    change: float
    se: float
    ess: float
    clipped: float


def entropy_change(
    before: Tokens, after: Tokens, written_B_T: torch.Tensor, group_B: torch.Tensor, estimand: str
) -> Change:
    """Σ w F' / Σ w T - Σ F / Σ T with w_i = exp(clip(Σ_j log q'_j - log q_j, ±10)) and F' the entropies after the step.

    T is the number of tokens (per token), or 1; F is ΣH, or ΣH / T for the mean over a rollout. Rows weigh 1 / (rollouts of
    their prompt). Under top_p below 1, q' keeps the nucleus of q. ``se``: jackknife over prompts (nan below two).
    ``ess`` = (Σw)² / Σw².
    Example (per token): log-weights (.1, -.1, 0), F' = (2, 3, 1), T = (4, 6, 2), F = (2.1, 3.1, 1.05): -.020833, ESS 2.980.
    """
    prompt_B, P = prompt_numbers(group_B)
    tokens_B = written_B_T.sum(1).double()
    f_B, new_f_B = (torch.where(written_B_T, t.entropy_B_T, 0.0).sum(1).double() for t in (before, after))
    length_B = tokens_B if estimand == PER_TOKEN else torch.ones_like(tokens_B)
    if estimand == PER_SEQUENCE_MEAN:
        f_B, new_f_B = f_B / tokens_B.clamp_min(1), new_f_B / tokens_B.clamp_min(1)
    log_w_B = torch.where(written_B_T, after.log_prob_B_T - before.log_prob_B_T, 0.0).sum(1).double()
    w_B = log_w_B.clamp(-LOG_WEIGHT_LIMIT, LOG_WEIGHT_LIMIT).exp()
    columns = [w_B * new_f_B, w_B * length_B, f_B, length_B]
    table_P_4 = torch.stack([mean_by_prompt(column, prompt_B, P) for column in columns], 1)
    se = float("nan")
    if P >= 2:
        left_out_P = _difference((table_P_4.sum(0) - table_P_4) / (P - 1))
        se = float(((P - 1) / P * (left_out_P - left_out_P.mean()).square().sum()).sqrt())
    return Change(
        change=float(_difference(table_P_4.mean(0))),
        se=se,
        ess=float(w_B.sum().square() / w_B.square().sum()),
        clipped=float((log_w_B.abs() > LOG_WEIGHT_LIMIT).double().mean()),
    )


def _difference(means: torch.Tensor) -> torch.Tensor:
    new, new_length, old, length = means.unbind(-1)
    return new / new_length - old / length


def log_log_slope(etas: list[float], changes: list[float]) -> float:
    """The least-squares slope of log |ΔH| on log η: 1 where the change is linear. Errors: ValueError for a change of 0."""
    if len(etas) < 2 or any(change == 0 for change in changes):
        raise ValueError(f"log |ΔH| against log η needs two changes that are not 0, got {changes}")
    x, y = (torch.tensor(v, dtype=torch.float64).abs().log() for v in (etas, changes))
    return float(((x - x.mean()) * (y - y.mean())).sum() / (x - x.mean()).square().sum())
