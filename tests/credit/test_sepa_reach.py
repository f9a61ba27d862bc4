"""When lambda can act at the earliest: the formulas against the controller, fed with the fastest fall there is."""

import itertools
import math
import re

import pytest
import torch

from kit.each import each
from kit.idle import without_effect
from kit.recipes import load_config
from verl_credit.credit.token.sepa_controller import (
    SepaController,
    auto_can_lead,
    first_auto_step,
    first_ramp_step,
)

PUBLISHED = {
    "steps": 500, "schedule": "auto", "delay_steps": 50, "correct_rate_gate": 0.0,
    "ema_decay": 0.99, "var_threshold": 0.2, "warmup": 50, "ramp_from": "start",
}  # fmt: skip


def lambdas(settings, last):
    """lambda of steps 1..last: variance 1 in the warm-up, 0 after it."""
    controller, found = SepaController(**settings), []
    for step in range(1, last + 1):
        found.append(controller.lam(step))
        controller.observe(step, 1.0, torch.tensor([0.0, 2.0 if step <= settings["warmup"] else 0.0]))
    return found


@each(
    "decay, threshold, warmup",
    [*itertools.product((0, 0.3, 0.5, 0.9, 0.97), (0.05, 0.2, 0.25, 0.5, 1), (1, 4))],
)
def test_the_first_step_of_the_fall_is_the_controllers(decay, threshold, warmup):
    settings = PUBLISHED | {"steps": 0, "ema_decay": decay, "var_threshold": threshold, "warmup": warmup}
    first = first_auto_step(settings)
    found = lambdas(settings, first)
    assert found[-1] > 0 and not any(found[:-1])


def test_the_published_values_cannot_act_before_step_212():
    assert first_auto_step(PUBLISHED) == 212
    assert first_auto_step(PUBLISHED | {"ema_decay": 1}) == math.inf
    assert (first_ramp_step(PUBLISHED), first_ramp_step(PUBLISHED | {"steps": 0})) == (51, math.inf)


@pytest.mark.parametrize(
    "decay, last", [(0.9, 28), (0.9, 29), (0.9, 150), (0.99, 150), (0.97, 110), (0.5, 20)]
)
def test_whether_the_fall_leads_is_what_the_controller_shows(decay, last):
    """At the recipe's ramp, against the same run with schedule=linear."""
    settings = PUBLISHED | {"steps": 100, "delay_steps": 10, "ema_decay": decay, "warmup": 10}
    auto, linear = (lambdas(settings | {"schedule": name}, last) for name in ("auto", "linear"))
    assert auto_can_lead(settings, last) == (auto != linear)


def test_a_ramp_from_the_gate_may_begin_late():
    late = PUBLISHED | {"steps": 1, "delay_steps": 0, "warmup": 1, "ema_decay": 0.1, "correct_rate_gate": 0.1}
    assert not auto_can_lead(late, 150)
    assert auto_can_lead(late | {"ramp_from": "gate"}, 150)
    open_from_the_start = late | {"ramp_from": "gate", "correct_rate_gate": 0.0}
    assert not auto_can_lead(open_from_the_start, 150)


@pytest.mark.slow
def test_the_arms_of_the_recipe_can_differ():
    config = load_config("math_sepa", ["algorithm.sepa.schedule=auto"])
    settings = dict(config.algorithm.sepa)
    assert first_auto_step(settings) == 27
    opened = settings | {"correct_rate_gate": 0.0}
    arms = [
        lambdas(opened | {"schedule": s}, config.trainer.total_training_steps) for s in ("auto", "linear")
    ]
    assert [a != b for a, b in zip(*arms, strict=True)].index(True) + 1 == 29
    assert without_effect(config) == []


@pytest.mark.parametrize(
    "overrides, told",
    [
        (["ema_decay=0.99", "warmup=50"], "the linear ramp's in every step, and .*=150; .*from step 212 on"),
        (["ema_decay=1"], "schedule=auto: lambda is the linear ramp's .* can act never"),
        (["ema_decay=1", "steps=0"], "steps=0, schedule=auto: lambda is 0 for ever"),
        (["ema_decay=0.99", "warmup=50", "steps=0"], "lambda is 0 until step 212"),
        (["schedule=linear", "steps=0"], "steps=0, schedule=linear: lambda is 0 for ever"),
    ],
)  # fmt: skip
def test_a_schedule_that_cannot_act_is_told(overrides, told):
    keys = ["algorithm.sepa.schedule=auto", *(f"algorithm.sepa.{o}" for o in overrides)]
    (line,) = without_effect(load_config("math_sepa", keys))
    assert re.search(told, line), line
