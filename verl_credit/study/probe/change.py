"""The change of entropy by an update: predicted to first order, and measured, each with its standard errors.

δH₁ = η X · v follows from directional derivatives. ΔH is measured on the rollouts of θ, reweighted to θ + δθ
(self-normalised importance sampling).

Inside training, update t moves the policy from θ_t to θ_{t+1}. The next step's rollouts are drawn from θ_{t+1}, on other
prompts: a sample E that the update has not seen. Both numbers are taken there:

    δH₁ = ∇H(θ_{t+1}) · (θ_{t+1} - θ_t)        ΔH = H(θ_{t+1}) - H(θ_t)

The gradient is taken at the new point, because E is drawn from it. To first order that is the prediction from the old one;
the second-order term has the other sign.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from verl_credit.study.probe.entropy_gradient import EntropyGradient
from verl_credit.study.probe.policy import Tokens
from verl_credit.study.probe.rollouts import mean_by_prompt, prompt_numbers
from verl_credit.study.probe.settings import PER_SEQUENCE_MEAN, PER_TOKEN

LOG_WEIGHT_LIMIT = 10.0


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
    """The prediction from means over prompts: N' of the numerator's, D' of the length's derivative, F of the entropy, T
    of the length.

        δH₁ / η = (N' - (F / T) D') / T        (per token)        or N' (T = 1, D' = 0)

    ``conditional_se``: sqrt(sample variance over prompts / prompts) of the linearised contributions, which for T = 1 are the
    s_n = X_n · v of the notes. ``jackknife_se``: prompts left out one by one. Both are nan for fewer than two prompts.
    """
    zero_B, length = torch.zeros_like(gradient.entropy_B), gradient.length
    columns = [
        gradient.numerator.along(derivative),
        zero_B if length is None else length.along(derivative),
        gradient.entropy_B,
        gradient.length_B,
    ]
    table_P_4 = torch.stack([mean_by_prompt(column, gradient.prompt_B) for column in columns], 1)
    slope = _ratio(table_P_4.mean(0))
    entropy = float(table_P_4[:, 2].mean() / table_P_4[:, 3].mean())
    if (P := len(table_P_4)) < 2:
        return Prediction(float(slope), float("nan"), float("nan"), entropy)
    # The influence of each prompt on the ratio (delta method), up to a constant.
    n_P, d_P, f_P, t_P = table_P_4.unbind(-1)
    _, d, f, t = table_P_4.mean(0)
    influence_P = (n_P - f / t * d_P - d * (f_P / t - f * t_P / t**2)) / t - slope * t_P / t
    conditional = influence_P.std() / P**0.5
    return Prediction(float(slope), float(conditional), _jackknife(_ratio(_left_out(table_P_4))), entropy)


def _left_out(table_P_4: torch.Tensor) -> torch.Tensor:
    """The means over all prompts but one, for each prompt; nan for a single prompt."""
    return (table_P_4.sum(0) - table_P_4) / (len(table_P_4) - 1)


def _jackknife(left_out_P: torch.Tensor) -> float:
    """The standard error of an estimate from its values without each prompt."""
    P = len(left_out_P)
    return float(((P - 1) / P * (left_out_P - left_out_P.mean()).square().sum()).sqrt())


def _ratio(means: torch.Tensor) -> torch.Tensor:
    n, d, f, t = means.unbind(-1)
    return (n - f / t * d) / t


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
    return UStatistic(float(value), float(plug_in), _jackknife((P * value - 2 * r_P) / (P - 2)))


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
    prompt_B = prompt_numbers(group_B)
    tokens_B = written_B_T.sum(1).double()
    f_B, new_f_B = (torch.where(written_B_T, t.entropy_B_T, 0.0).sum(1).double() for t in (before, after))
    length_B = tokens_B if estimand == PER_TOKEN else torch.ones_like(tokens_B)
    if estimand == PER_SEQUENCE_MEAN:
        f_B, new_f_B = f_B / tokens_B.clamp_min(1), new_f_B / tokens_B.clamp_min(1)
    log_w_B = torch.where(written_B_T, after.log_prob_B_T - before.log_prob_B_T, 0.0).sum(1).double()
    w_B = log_w_B.clamp(-LOG_WEIGHT_LIMIT, LOG_WEIGHT_LIMIT).exp()
    columns = [w_B * new_f_B, w_B * length_B, f_B, length_B]
    table_P_4 = torch.stack([mean_by_prompt(column, prompt_B) for column in columns], 1)
    return Change(
        change=float(_difference(table_P_4.mean(0))),
        se=_jackknife(_difference(_left_out(table_P_4))),
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


def prompts_within(
    share: float, groups: int, available: int, step_s: float | None, prompt_s: float | None
) -> int:
    """How many prompts to measure: a multiple of ``groups``, at most ``available``, at least one a group.

    With s seconds of the step without the probe and p seconds a prompt, n p / (s + n p) <= share. ``prompt_s`` is None
    before the first measurement, which takes one prompt a group. 0 where ``available`` is less than ``groups``.
    """
    whole = available // groups * groups
    if prompt_s is None or step_s is None:
        return min(groups, whole)
    if share == 1:
        return whole
    fit = int(share / (1 - share) * step_s / prompt_s)
    return min(whole, max(groups, fit // groups * groups))


def group_prompts(prompt_B: torch.Tensor, prompts: list[int], groups: int) -> list[list[int]]:
    """The rows of each group; prompt number i of ``prompts`` is in group i mod ``groups``. ``prompt_B``: int64 [B]."""
    group_of = {prompt: place % groups for place, prompt in enumerate(prompts)}
    rows: list[list[int]] = [[] for _ in range(groups)]
    for row, prompt in enumerate(prompt_B.tolist()):
        if prompt in group_of:
            rows[group_of[prompt]].append(row)
    return rows


def deal(rows_G: list[list[int]], ranks: int, micro: int) -> list[tuple[int, int, bool]]:
    """(row, group, counts) in an order that can be cut into ``ranks`` equal parts, one a rank.

    Every rank has equally many rows of every group, and whole micro-batches of ``micro`` rows: each group's first row is
    repeated, without counting, until they divide.
    """
    parts = []
    for group, rows in enumerate(rows_G):
        repeated = [(rows[0], group, False)] * (-len(rows) % (ranks * micro))
        parts.append([(row, group, True) for row in rows] + repeated)
    return [entry for rank in range(ranks) for part in parts for entry in part[rank::ranks]]


def predicted_change(along_G: torch.Tensor, tokens_G: torch.Tensor) -> tuple[float, float]:
    """(δH₁, standard error), nats per token. ``along_G``: each group's sum over prompts of the surrogate's derivative along
    the update; ``tokens_G``: its sum over prompts of the mean number of tokens of a rollout. Both float64 [G], G >= 2.

        δH₁ = Σ along / Σ tokens        SE² = G / (G - 1) Σ (along - δH₁ tokens)² / (Σ tokens)²

    For groups of equal tokens the error is that of a mean of G numbers.
    """
    groups, tokens = len(along_G), tokens_G.sum()
    value = along_G.sum() / tokens
    rest_G = along_G - value * tokens_G
    return float(value), float((groups / (groups - 1) * rest_G.square().sum()).sqrt() / tokens)
