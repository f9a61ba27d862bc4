"""The gradient of the loss that makes the update, as weights on ∇log π of U's tokens, at the parameters that wrote them."""

from __future__ import annotations

import torch

from verl_credit.credit.loss import aggregate
from verl_credit.study.probe.returns import mean_by_prompt, prompt_numbers
from verl_credit.study.probe.rollouts import Rollouts


def credit_weights(
    u: Rollouts, loss_agg_mode: str, loss_scale_factor: float | None, tokens: int
) -> torch.Tensor:
    """∇loss = Σ weight ∇log π, [B, T]: the run's own advantages, aggregated as its loss does.

    At the parameters that wrote the rollouts every importance ratio is 1, so no clip acts, and for every ratio level
    d loss_t / d log π_t = -A_t. ``tokens``: width of the response axis, which seq-mean-token-sum-norm divides by.
    """
    if u.advantage_B_T is None:
        raise ValueError(
            "update.objective=credit: these rollouts were stored without advantages; use objective=outcome"
        )
    log_prob_B_T = torch.zeros_like(u.advantage_B_T, dtype=torch.float64, requires_grad=True)
    loss_B_T = -u.advantage_B_T.double() * log_prob_B_T
    scale = tokens if loss_scale_factor is None else loss_scale_factor
    loss = aggregate(loss_B_T, u.trained, loss_agg_mode, loss_scale_factor=scale)
    return torch.autograd.grad(loss, log_prob_B_T)[0]


def outcome_weights(u: Rollouts, tokens: int) -> torch.Tensor:
    """∇loss = -(1/P) Σ_prompts (1/G) Σ_g A_g / tokens ∇S_g with A = r - mean of the prompt, [B, T].

    Source: the founding plan (dr_grpo weighting). ``tokens``: its L_max, the longest response that the run allows.
    """
    prompt_B, n_prompts = prompt_numbers(u.group_B)
    advantage_B = u.outcome_B.double() - mean_by_prompt(u.outcome_B, prompt_B, n_prompts)[prompt_B]
    rows_P = torch.bincount(prompt_B, minlength=n_prompts)
    weight_B = -advantage_B / (rows_P[prompt_B] * n_prompts * tokens)
    return torch.where(u.trained, weight_B[:, None], 0.0)
