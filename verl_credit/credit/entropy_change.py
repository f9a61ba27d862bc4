"""The change of entropy by an update of the policy, with its standard error: measured on rollouts, or predicted by groups.

Inside training, update t moves the policy from θ_t to θ_{t+1}. The next step's rollouts are drawn from θ_{t+1}, on other
prompts: a sample that the update has not seen. Both numbers are taken there:

    δH₁ = ∇H(θ_{t+1}) · (θ_{t+1} - θ_t)        ΔH = H(θ_{t+1}) - H(θ_t)

The gradient is taken at the new point, because the sample is drawn from it. To first order that is the prediction from the
old one; the second-order term has the other sign.
"""

from __future__ import annotations

from dataclasses import dataclass

from verl_credit.credit.entropy_gradient import Tokens, mean_by_prompt, prompt_numbers
from verl_credit.lazy import torch

LOG_WEIGHT_LIMIT = 10.0


@dataclass(frozen=True)
class Change:
    """``change`` = H(θ + δθ) - H(θ) in nats per token; ``clipped``: share of log-weights beyond the limit."""

    change: float
    se: float
    ess: float
    clipped: float


def entropy_change(before: Tokens, after: Tokens, written_B_T: torch.Tensor, group_B: torch.Tensor) -> Change:
    """Σ w F' / Σ w T - Σ F / Σ T with w_i = exp(clip(Σ_j log q'_j - log q_j, ±10)) and F' the entropies after the step.

    T is the number of tokens, F is ΣH. Rows weigh 1 / (rollouts of their prompt). Under top_p below 1, q' keeps the nucleus
    of q. ``se``: jackknife over prompts (nan below two).
    ``ess`` = (Σw)² / Σw².
    Example: log-weights (.1, -.1, 0), F' = (2, 3, 1), T = (4, 6, 2), F = (2.1, 3.1, 1.05): -.020833, ESS 2.980.
    """
    prompt_B = prompt_numbers(group_B)
    tokens_B = written_B_T.sum(1).double()
    f_B, new_f_B = (torch.where(written_B_T, t.entropy_B_T, 0.0).sum(1).double() for t in (before, after))
    log_w_B = torch.where(written_B_T, after.log_prob_B_T - before.log_prob_B_T, 0.0).sum(1).double()
    w_B = log_w_B.clamp(-LOG_WEIGHT_LIMIT, LOG_WEIGHT_LIMIT).exp()
    columns = [w_B * new_f_B, w_B * tokens_B, f_B, tokens_B]
    table_P_4 = torch.stack([mean_by_prompt(column, prompt_B) for column in columns], 1)
    return Change(
        change=float(_difference(table_P_4.mean(0))),
        se=jackknife(_difference(left_out(table_P_4))),
        ess=float(w_B.sum().square() / w_B.square().sum()),
        clipped=float((log_w_B.abs() > LOG_WEIGHT_LIMIT).double().mean()),
    )


def _difference(means: torch.Tensor) -> torch.Tensor:
    new, new_length, old, length = means.unbind(-1)
    return new / new_length - old / length


def left_out(table_P_4: torch.Tensor) -> torch.Tensor:
    """The means over all prompts but one, for each prompt; nan for a single prompt."""
    return (table_P_4.sum(0) - table_P_4) / (len(table_P_4) - 1)


def jackknife(left_out_P: torch.Tensor) -> float:
    """The standard error of an estimate from its values without each prompt."""
    P = len(left_out_P)
    return float(((P - 1) / P * (left_out_P - left_out_P.mean()).square().sum()).sqrt())


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
