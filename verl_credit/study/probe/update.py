"""Y: what one step of AdamW does to the parameters, per unit of learning rate.

    v = (θ' − θ) / η = −m̂ / (√v̂ + ε) − λ θ
    m̂ = (β₁ m + (1 − β₁) g) / (1 − β₁ᵗ⁺¹)
    v̂ = (β₂ s + (1 − β₂) g²) / (1 − β₂ᵗ⁺¹)

m and s are the moments after t steps, g is the clipped gradient of the loss. Sources: torch.optim.AdamW, verl's FSDP engine.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

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
    lr: float
    """The rate of the next step: a scheduler writes it into the group after every step."""
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    amsgrad: bool = False
    max_exp_avg_sq: torch.Tensor | None = None
    """the largest s so far; only with ``amsgrad``"""


@dataclass(frozen=True)
class OptimizerState:
    """AdamW's state by parameter. ``lr``: the rate of the first group."""

    lr: float
    parameters: dict[str, ParameterState]


def parameter_state(saved: dict, group: dict, like: torch.Tensor) -> ParameterState:
    """One parameter's entry of an optimiser's ``state``, copied; an empty one is zeros, as AdamW starts.

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
    copied = {
        key: saved[key].detach().clone() if saved else torch.zeros_like(like) for key in _moments(group)
    }
    for key, moment in copied.items():
        if moment.shape != like.shape:
            raise ValueError(f"{key} has shape {tuple(moment.shape)}, the parameter {tuple(like.shape)}")
    return ParameterState(
        **copied,
        step=int(saved["step"]) if saved else 0,
        lr=float(group["lr"]),
        betas=(float(group["betas"][0]), float(group["betas"][1])),
        eps=float(group["eps"]),
        weight_decay=float(group["weight_decay"]),
        amsgrad=bool(group.get("amsgrad")),
    )


def _moments(group: dict) -> list[str]:
    return ["exp_avg", "exp_avg_sq", *(["max_exp_avg_sq"] if group.get("amsgrad") else [])]


def optimizer_state(
    optimizer: torch.optim.Optimizer, named_parameters: Iterable[tuple[str, torch.nn.Parameter]]
) -> OptimizerState:
    """The state of a live optimiser, copied: later steps of the optimiser do not change it."""
    names = {parameter: name for name, parameter in named_parameters}
    found = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter not in names:
                raise ValueError(
                    f"the optimiser moves a parameter of shape {tuple(parameter.shape)} that is not among the named ones"
                )
            found[names[parameter]] = parameter_state(optimizer.state.get(parameter, {}), group, parameter)
    return OptimizerState(lr=float(optimizer.param_groups[0]["lr"]), parameters=found)


def adamw_step(
    parameters: Tensors, gradient: Tensors, state: OptimizerState, *, max_grad_norm: float | None
) -> Tensors:
    """v = (θ' − θ) / η by parameter, for the step that AdamW makes next with this gradient of the loss.

    η is the rate of the first group. A group with another rate η_g moves by η_g / η times its own v; a scheduler keeps such
    ratios. A parameter without a gradient (absent or None) gets zeros: AdamW does not touch it, decay included.
    v has the dtype and device of the gradient, and the arithmetic is done in it: give float32 or float64.

    Args:
        parameters: θ by name.
        gradient: ∂loss/∂θ by name, averaged over the batch as training averages it, before clipping.
        state: of the optimiser before the step.
        max_grad_norm: the gradient is scaled by min(1, max_grad_norm / (‖g‖ + 1e-6)), ‖g‖ over all parameters; None or 0
            leaves it as it is (verl itself, with ``clip_grad=0``, would make it zero).

    Raises:
        ValueError: ‖g‖ is not finite (verl skips such a step); a name or a shape that does not fit.
    """
    step = {name: torch.zeros_like(value) for name, value in parameters.items() if gradient.get(name) is None}
    step |= {name: old.add_(new) for name, old, new in _parts(parameters, gradient, state, max_grad_norm)}
    return {name: step[name] for name in parameters}


def decompose(
    parameters: Tensors, gradient: Tensors, state: OptimizerState, *, max_grad_norm: float | None
) -> tuple[Tensors, Tensors]:
    """`adamw_step` as the sum of what momentum and decay do and what the gradient does.

        old = −β₁ m / ((1 − β₁ᵗ⁺¹) (√v̂ + ε)) − λ θ
        new = −(1 − β₁) g / ((1 − β₁ᵗ⁺¹) (√v̂ + ε))

    v̂ and the clip factor hold the whole gradient in both. With these two frozen, ``new`` is linear in g: the parts of single
    rollouts add up to it. Returns (old, new), both only for parameters with a gradient.
    """
    old, new = {}, {}
    for name, by_state, by_gradient in _parts(parameters, gradient, state, max_grad_norm):
        old[name], new[name] = by_state, by_gradient
    return old, new


def _parts(
    parameters: Tensors, gradient: Tensors, state: OptimizerState, max_grad_norm: float | None
) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """(name, old, new) of `decompose`."""
    present = _present(gradient, parameters, state)
    scale = clip_factor(present, max_grad_norm)
    for name, unclipped in present.items():
        g, own = unclipped * scale, state.parameters[name]
        m, theta = own.exp_avg.to(g), parameters[name].detach().to(g)
        (beta1, beta2), t = own.betas, own.step + 1
        second = beta2 * own.exp_avg_sq.to(g) + (1 - beta2) * g.square()
        if own.amsgrad:
            second = torch.maximum(own.max_exp_avg_sq.to(g), second)
        rate = _ratio(own.lr, state.lr, name)
        divisor = (1 - beta1**t) * (second.sqrt() / math.sqrt(1 - beta2**t) + own.eps) / rate
        yield name, -beta1 * m / divisor - rate * own.weight_decay * theta, (beta1 - 1) * g / divisor


def clip_factor(gradient: Tensors, max_grad_norm: float | None) -> float:
    """min(1, max_grad_norm / (‖g‖ + 1e-6)), as torch's ``clip_grad_norm_``; 1 for None or 0."""
    norm = torch.linalg.vector_norm(
        torch.stack([torch.linalg.vector_norm(g) for g in gradient.values()])
    ).item()
    if not math.isfinite(norm):
        raise ValueError(
            f"the gradient's norm is {norm}: verl skips such a step, so no update follows from it"
        )
    return min(1.0, max_grad_norm / (norm + 1e-6)) if max_grad_norm else 1.0


def diagonal_step(gradient: Tensors, state: OptimizerState) -> Tensors:
    """−P g with P = 1 / (√v̂ + ε) and v̂ = s / (1 − β₂ᵗ): a step along the preconditioned gradient.

    It is not what AdamW does next. It leaves out momentum and its (1 − β₁) / (1 − β₁ᵗ⁺¹), weight decay, clipping, the
    gradient's own share of v̂ and different rates of groups. Only parameters with a gradient are in the result.
    Raises ValueError where a parameter has made no step: P would be 1/ε.
    """
    step = {}
    for name, g in _present(gradient, gradient, state).items():
        own = state.parameters[name]
        if own.step == 0:
            raise ValueError(
                f"{name}: the optimiser has made no step, so there is no second moment to divide by"
            )
        step[name] = -g / ((own.exp_avg_sq.to(g) / (1 - own.betas[1] ** own.step)).sqrt() + own.eps)
    return step


def _present(gradient: Tensors, parameters: Tensors, state: OptimizerState) -> Tensors:
    """The gradients that are there, checked against parameters and state."""
    present = {name: g.detach() for name, g in gradient.items() if g is not None}
    if not present:
        raise ValueError("no parameter has a gradient")
    for name, g in present.items():
        for what, known in (("parameter", parameters), ("state of the optimiser", state.parameters)):
            if name not in known:
                raise ValueError(f"there is a gradient but no {what} of {name}")
        for other in (parameters[name], state.parameters[name].exp_avg):
            if g.shape != other.shape:
                raise ValueError(
                    f"{name}: the gradient has shape {tuple(g.shape)}, expected {tuple(other.shape)}"
                )
    return present


def _ratio(rate: float, first: float, name: str) -> float:
    """A group's rate over the first group's."""
    if rate == first:
        return 1.0
    if first == 0:
        raise ValueError(
            f"{name}: its group's lr is {rate}, the first group's is 0: their ratio is undefined"
        )
    return rate / first
