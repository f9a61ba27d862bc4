"""Y: the gradient of the loss as weights on ∇log π, and its change by one step of AdamW, per unit of learning rate.

    v = (θ' − θ) / η = −m̂ / (√v̂ + ε) − λ θ
    m̂ = (β₁ m + (1 − β₁) g) / (1 − β₁ᵗ⁺¹)
    v̂ = (β₂ s + (1 − β₂) g²) / (1 − β₂ᵗ⁺¹)

m and s are the moments after t steps, g is the clipped gradient of the loss. Sources: torch.optim.AdamW, verl's FSDP engine.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from verl_credit.credit.loss import aggregate
from verl_credit.study.probe.kept_rollouts import Rollouts

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class ParameterState:
    """AdamW's state of one parameter, and the settings of the parameter's own group (not the optimiser's defaults)."""

    exp_avg: torch.Tensor
    """m, the shape of the parameter"""
    exp_avg_sq: torch.Tensor
    """s, the shape of the parameter"""
    step: int
    """t, the steps that this parameter has made"""
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    max_exp_avg_sq: torch.Tensor | None = None
    """the largest s so far; only with ``amsgrad``"""


@dataclass(frozen=True)
class OptimizerState:
    """AdamW's state by parameter."""

    lr: float
    """The rate of the next step: a scheduler writes it into the group after every step."""
    parameters: dict[str, ParameterState]


def parameter_state(saved: dict, group: dict, like: torch.Tensor) -> ParameterState:
    """Copies a parameter's entry of an optimiser's ``state``; an empty entry gives zeros, as AdamW starts.

    ``group``: the parameter's entry of ``param_groups``. ``like``: the parameter, for its shape.
    Raises ValueError for an optimiser that is not AdamW.
    """
    missing = [key for key in ("lr", "betas", "eps", "weight_decay") if key not in group]
    missing += [key for key in ("exp_avg", "exp_avg_sq", "step") if saved and key not in saved]
    if missing:
        raise ValueError(f"the optimiser is not torch's AdamW: it has no {', '.join(missing)}")
    if group["weight_decay"] and not group.get("decoupled_weight_decay", True):
        raise ValueError("the optimiser is Adam with weight decay in the gradient, expected AdamW")
    if group.get("maximize"):
        raise ValueError("the optimiser has maximize=True, expected AdamW that descends")
    moments = ["exp_avg", "exp_avg_sq", *(["max_exp_avg_sq"] if group.get("amsgrad") else [])]
    copied = {key: saved[key].detach().clone() if saved else torch.zeros_like(like) for key in moments}
    return ParameterState(
        **copied,
        step=int(saved["step"]) if saved else 0,
        betas=(float(group["betas"][0]), float(group["betas"][1])),
        eps=float(group["eps"]),
        weight_decay=float(group["weight_decay"]),
    )


def credit_weights(
    u: Rollouts, loss_agg_mode: str, loss_scale_factor: float | None, tokens: int
) -> torch.Tensor:
    """∇loss = Σ weight ∇log π over U's tokens, [B, T]: the run's own advantages, aggregated as its loss does.

    At the parameters that wrote the rollouts every importance ratio is 1, so no clip acts, and for every ratio level
    d loss_t / d log π_t = -A_t. ``tokens``: width of the response axis, which seq-mean-token-sum-norm divides by.
    """
    if u.advantage_B_T is None:
        raise ValueError("the rollouts were stored without advantages, of which an update is made")
    log_prob_B_T = torch.zeros_like(u.advantage_B_T, dtype=torch.float64, requires_grad=True)
    loss_B_T = -u.advantage_B_T.double() * log_prob_B_T
    scale = tokens if loss_scale_factor is None else loss_scale_factor
    loss = aggregate(loss_B_T, u.trained, loss_agg_mode, loss_scale_factor=scale)
    return torch.autograd.grad(loss, log_prob_B_T)[0]


def adamw_step(
    parameters: Tensors, gradient: Tensors, state: OptimizerState, *, max_grad_norm: float | None
) -> Tensors:
    """v = (θ' − θ) / η by parameter, for the step that AdamW makes next, in the gradient's dtype.

    ``gradient``: ∂loss/∂θ, averaged as training averages it; scaled here by min(1, max_grad_norm / (‖g‖ + 1e-6)), as torch's
    ``clip_grad_norm_``. None or 0 leaves it as it is (verl itself, with ``clip_grad=0``, would make it zero).

    Raises ValueError for a ‖g‖ that is not finite (verl skips such a step).
    """
    norms = torch.stack([torch.linalg.vector_norm(g) for g in gradient.values()])
    if not math.isfinite(norm := torch.linalg.vector_norm(norms).item()):
        raise ValueError(f"the gradient's norm is {norm}: verl skips such a step")
    scale, step = min(1.0, max_grad_norm / (norm + 1e-6)) if max_grad_norm else 1.0, {}
    for name, unclipped in gradient.items():
        g, own = unclipped * scale, state.parameters[name]
        m, theta = own.exp_avg.to(g), parameters[name].to(g)
        (beta1, beta2), t = own.betas, own.step + 1
        second = beta2 * own.exp_avg_sq.to(g) + (1 - beta2) * g.square()
        if own.max_exp_avg_sq is not None:
            second = torch.maximum(own.max_exp_avg_sq.to(g), second)
        divisor = (1 - beta1**t) * (second.sqrt() / math.sqrt(1 - beta2**t) + own.eps)
        step[name] = -beta1 * m / divisor - own.weight_decay * theta + (beta1 - 1) * g / divisor
    return step
