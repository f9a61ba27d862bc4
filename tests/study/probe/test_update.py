"""The step of AdamW per unit of learning rate: against torch's optimiser, and by hand."""

import math

import pytest
import torch

from kit.live_optimizer import optimizer_state
from verl_credit.study.probe.update import OptimizerState, ParameterState, adamw_step

SHAPES = {"embed": (7, 3), "bias": (5,), "scale": (), "head": (2, 3, 4)}


def parameters_of(seed):
    random = torch.Generator().manual_seed(seed)
    return {
        name: torch.nn.Parameter(torch.randn(shape, generator=random, dtype=torch.float64))
        for name, shape in SHAPES.items()
    }


def gradient_of(seed, size=1.0):
    random = torch.Generator().manual_seed(1000 + seed)
    return {
        name: size * torch.randn(shape, generator=random, dtype=torch.float64)
        for name, shape in SHAPES.items()
    }


def take(optimizer, parameters, gradient, max_grad_norm):
    for name, parameter in parameters.items():
        parameter.grad = gradient[name].clone()
    if max_grad_norm:
        torch.nn.utils.clip_grad_norm_(parameters.values(), max_grad_norm)
    optimizer.step()


def one_group(parameters, lr=3e-3):
    return torch.optim.AdamW(parameters.values(), lr=lr, betas=(0.8, 0.97), eps=1e-3, weight_decay=0.3)


def three_groups(parameters, amsgrad=False):
    embed, bias, scale, head = parameters.values()
    return torch.optim.AdamW(
        [
            {"params": [embed], "weight_decay": 0.2},
            {"params": [head], "betas": (0.5, 0.6), "eps": 0.3, "weight_decay": 0.0},
            {"params": [bias, scale], "eps": 1e-2},
        ],
        lr=2e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=9.0, amsgrad=amsgrad,
    )  # fmt: skip


def alone(m, s, step, betas, eps, decay):
    """The state of one parameter `w` of one number."""
    number = lambda x: torch.tensor([x], dtype=torch.float64)  # noqa: E731
    own = ParameterState(number(m), number(s), step, betas, eps, decay)
    return OptimizerState(lr=1.0, parameters={"w": own})


def w(number):
    return {"w": torch.tensor([number], dtype=torch.float64)}


@pytest.mark.parametrize("max_grad_norm", [None, 0, 0.5, 50.0])
@pytest.mark.parametrize("build", [one_group, three_groups, lambda p: three_groups(p, amsgrad=True)])
def test_the_step_is_the_one_that_torch_makes(build, max_grad_norm):
    parameters = parameters_of(1)
    optimizer = build(parameters)
    for turn in range(4):
        gradient = gradient_of(turn, size=3.0 / (1 + turn))
        before = {name: parameter.detach().clone() for name, parameter in parameters.items()}
        state = optimizer_state(optimizer, parameters.items())
        step = adamw_step(before, gradient, state, max_grad_norm=max_grad_norm)
        take(optimizer, parameters, gradient, max_grad_norm)
        assert list(step) == list(SHAPES)
        for name, parameter in parameters.items():
            moved = (parameter.detach() - before[name]) / optimizer.param_groups[0]["lr"]
            torch.testing.assert_close(step[name], moved, rtol=1e-9, atol=1e-10)


def test_worked_by_hand():
    """m̂ = (.5 × .2 + .5 × .4) / .75 = .4; v̂ = (.75 × .04 + .25 × .16) / .4375 = .16; −.4 / (.4 + .1) − .1 × 2 = −1."""
    state = alone(m=0.2, s=0.04, step=1, betas=(0.5, 0.75), eps=0.1, decay=0.1)
    step = adamw_step(w(2.0), w(0.4), state, max_grad_norm=None)
    assert step["w"].item() == pytest.approx(-1.0, abs=1e-15)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("max_grad_norm", [None, 1.0])
def test_a_norm_that_is_not_finite_is_refused(bad, max_grad_norm):
    state = alone(m=0.1, s=0.3, step=2, betas=(0.9, 0.99), eps=1e-8, decay=0.1)
    with pytest.raises(ValueError, match=f"the gradient's norm is {bad}: verl skips such a step"):
        adamw_step(w(1.0), w(bad), state, max_grad_norm=max_grad_norm)


def test_other_optimisers_are_refused():
    parameters = parameters_of(6)
    refused = [
        (torch.optim.SGD(parameters.values(), lr=1.0), "not torch's AdamW: it has no betas, eps"),
        (torch.optim.Adam(parameters.values(), weight_decay=0.1), "Adam with weight decay in the gradient"),
        (
            torch.optim.AdamW(parameters.values(), maximize=True),
            "maximize=True, expected AdamW that descends",
        ),
        (torch.optim.Adamax(parameters.values()), "not torch's AdamW: it has no exp_avg_sq"),
    ]
    for optimizer, message in refused:
        take(optimizer, parameters, gradient_of(0), None)
        with pytest.raises(ValueError, match=message):
            optimizer_state(optimizer, parameters.items())
