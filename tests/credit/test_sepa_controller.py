"""How strongly SEPA pools: worked schedules, the gate, the variance schedule, what is saved."""

import json
import math

import pytest
import torch

from kit.each import each
from verl_credit.credit.token.sepa_controller import SepaController

VAR_1, VAR_0 = torch.tensor([0.0, 2.0]), torch.tensor([1.0, 1.0])  # uncertainties of variance 1 and 0
NOTHING = torch.tensor([])
INF, NAN = math.inf, math.nan


def controller(**settings):
    """Without a gate or a delay unless a test asks for them."""
    return SepaController(**{"delay_steps": 0, "correct_rate_gate": 0.0} | settings)


def fed(controller, variances, start=0):
    """One observation per variance, at steps start, start + 1, ..."""
    for step, variance in enumerate(variances, start):
        controller.observe(step, 1.0, torch.tensor([0.0, 2 * math.sqrt(variance)], dtype=torch.float64))
    return controller


def test_defaults_are_the_published_ones():
    assert SepaController().state_dict()["settings"] == {
        "steps": 500, "schedule": "linear", "delay_steps": 50, "correct_rate_gate": 0.1,
        "ema_decay": 0.99, "var_threshold": 0.2, "warmup": 50, "ramp_from": "start",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("step", "lam"), [(0, 0), (50, 0), (51, 0.002), (60, 0.02), (110, 0.12), (300, 0.5), (550, 1), (9999, 1)]
)
def test_worked_linear_ramp(step, lam):
    assert controller(steps=500, delay_steps=50).lam(step) == pytest.approx(lam, abs=1e-15)
    assert controller(steps=0).lam(step) == 0


def test_worked_gate_that_opens_late_makes_lambda_jump():
    ours = SepaController(steps=100, delay_steps=10, correct_rate_gate=0.1)
    assert ours.lam(60) == 0 and ours.metrics(60) == {"sepa_lambda": 0.0, "sepa_gate_open": 0.0}
    ours.observe(59, 0.1, NOTHING)  # the gate opens at its own value
    assert ours.lam(60) == 0.5 and ours.metrics(60) == {"sepa_lambda": 0.5, "sepa_gate_open": 1.0}


def test_variance_schedule_against_a_loop():
    random = torch.rand(60, generator=torch.Generator().manual_seed(0))
    variances = (random * torch.linspace(1, 0, 60)).tolist()
    ours = controller(steps=200, schedule="auto", delay_steps=5, ema_decay=0.8, var_threshold=0.5, warmup=7)
    ema = var_0 = None
    for step, variance in enumerate(variances):
        auto = 0.0 if var_0 is None else 1 - min(ema / var_0 / 0.5, 1)
        assert ours.lam(step) == pytest.approx(max(auto, min(max((step - 5) / 200, 0), 1)), abs=1e-6)
        fed(ours, [variance], start=step)
        ema = variance if ema is None else 0.8 * ema + 0.2 * variance
        if step == 6:
            var_0 = max(ema, 1e-8)
    assert ours.var_0 == pytest.approx(var_0) and ours.warmup_seen == 7


@pytest.mark.parametrize(("schedule", "lam"), [("linear", 0.25), ("auto", 1.0)])
def test_linear_reads_no_variance_and_auto_takes_the_larger(schedule, lam):
    assert fed(controller(steps=8, schedule=schedule, warmup=1, ema_decay=0.0), [1, 0]).lam(2) == lam


def test_no_variance_from_the_start_is_full_pooling():
    """var_0 is bounded from below, so 0 / 0 does not arise."""
    ours = fed(controller(steps=0, schedule="auto", warmup=1), [0])
    assert (ours.var_0, ours.lam(1)) == (1e-8, 1.0)


@pytest.mark.parametrize("schedule", ["linear", "auto"])
def test_gate_is_closed_then_sticky(schedule):
    ours = controller(steps=10, schedule=schedule, correct_rate_gate=0.5, warmup=1, ema_decay=0.0)
    for step, rate in enumerate([0.49, NAN, INF, -INF, 0.0]):
        ours.observe(step, rate, VAR_1 if step == 0 else VAR_0)
        assert not ours.gate_open and ours.lam(step + 1) == 0
    for step, rate in enumerate([0.5, 0.0, NAN], 5):
        ours.observe(step, rate, NOTHING)
        assert ours.gate_open and ours.gate_step == 5
        assert ours.lam(step + 1) == (1.0 if schedule == "auto" else (step + 1) / 10)


def test_ramp_from_the_gate():
    ours = SepaController(steps=100, delay_steps=10, correct_rate_gate=0.1, ramp_from="gate")
    ours.observe(60, 0.2, NOTHING)
    assert [ours.lam(step) for step in (61, 70, 71, 120, 170, 999)] == pytest.approx([0, 0, 0.01, 0.5, 1, 1])
    ungated = {ramp: controller(steps=100, delay_steps=10, ramp_from=ramp) for ramp in ("start", "gate")}
    assert all(ungated["start"].lam(step) == ungated["gate"].lam(step) for step in range(120))


def test_each_step_is_observed_once():
    ours = fed(controller(), [1, 1, 1])
    for step in (2, 0):
        with pytest.raises(ValueError, match=rf"step {step} was observed already \(the last one was 2\)"):
            ours.observe(step, 1.0, VAR_1)
    assert ours.warmup_seen == 3  # once per step, however many trajectories the step had
    fed(ours, [1], start=9)  # gaps are fine: a skipped step shows nothing


def test_values_that_make_no_sense_are_ignored():
    clean, dirty = controller(), controller()
    clean.observe(0, 1.0, VAR_1)
    dirty.observe(0, 1.0, torch.tensor([NAN, 0.0, INF, -INF, 2.0, -3.0]))
    assert dirty.var_ema == clean.var_ema == 1.0
    dirty.observe(1, 1.0, torch.tensor([NAN, -1.0]))
    dirty.observe(2, 1.0, NOTHING)
    assert (dirty.var_ema, dirty.warmup_seen, dirty.last_step) == (1.0, 1, 2)


@pytest.mark.parametrize("schedules", [("auto", "start"), ("linear", "gate")])
@pytest.mark.parametrize("stop", [0, 1, 3, 20, 55])
def test_a_saved_run_goes_on_as_if_it_had_not_stopped(stop, schedules):
    settings = dict(steps=60, delay_steps=3, correct_rate_gate=0.4, ema_decay=0.7, warmup=5)
    settings |= zip(("schedule", "ramp_from"), schedules, strict=True)
    generator = torch.Generator().manual_seed(2)
    shown = [(0.05 * step, torch.rand(9, generator=generator) / (1 + step)) for step in range(60)]
    straight, first = SepaController(**settings), SepaController(**settings)
    for step in range(stop):
        first.observe(step, *shown[step])
        straight.observe(step, *shown[step])
    resumed = SepaController(**settings)
    resumed.load_state_dict(json.loads(json.dumps(first.state_dict(), allow_nan=False)))
    assert resumed.state_dict() == first.state_dict() and resumed.last_step == (stop - 1 if stop else None)
    for step in range(stop, 60):
        assert resumed.lam(step) == straight.lam(step)
        resumed.observe(step, *shown[step])
        straight.observe(step, *shown[step])
    assert resumed.state_dict() == straight.state_dict() and straight.lam(60) > 0.8


OTHERS = {
    "steps": 7, "schedule": "auto", "delay_steps": 7, "correct_rate_gate": 0.7,
    "ema_decay": 0.7, "var_threshold": 0.7, "warmup": 7, "ramp_from": "gate",
}  # fmt: skip


def test_every_setting_is_compared_on_load():
    saved = SepaController().state_dict()
    told = "; ".join(f"{name} was .*, is '?{value}'?" for name, value in OTHERS.items())
    with pytest.raises(ValueError, match=f"other settings: {told}$"):
        SepaController(**OTHERS).load_state_dict(saved)


@pytest.mark.parametrize("name", ["var_ema", "var_0"])
def test_a_variance_may_be_0(name):
    saved = fed(controller(), [1, 1]).state_dict()
    saved["state"][name] = 0.0
    fresh = controller()
    fresh.load_state_dict(saved)
    assert fresh.state_dict() == saved


def test_values_too_large_to_be_squared_open_nothing():
    ours, plain = controller(schedule="auto", warmup=1), controller(schedule="auto", warmup=1)
    ours.observe(1, 1.0, torch.tensor([0.0, 1.0, 1e200], dtype=torch.float64))
    plain.observe(1, 1.0, torch.tensor([0.0, 1.0], dtype=torch.float64))
    assert ours.state_dict() == plain.state_dict()


@pytest.mark.parametrize("step", [-1, 1.0, True, None])
def test_a_step_is_a_whole_number(step):
    with pytest.raises(ValueError, match=f"step={step!r}: expected a whole number"):
        controller().observe(step, 1.0, torch.ones(2))


BAD_SETTINGS = [(name, bad) for name in ("steps", "delay_steps", "warmup") for bad in (-1, 1.5, True)]
BAD_SETTINGS += [
    (name, bad)
    for name in ("correct_rate_gate", "ema_decay", "var_threshold")
    for bad in (-0.1, 1.1, NAN, True)
]


@each("name, bad", BAD_SETTINGS)
def test_settings_out_of_range(name, bad):
    with pytest.raises(ValueError, match=rf"^{name}={bad}: expected a (whole )?number"):
        SepaController(**{name: bad})


def test_unknown_names():
    with pytest.raises(ValueError, match="schedule='liner' .*did you mean 'linear'.*accepted: linear, auto"):
        SepaController(schedule="liner")
    with pytest.raises(ValueError, match="ramp_from='gated' .*did you mean 'gate'"):
        SepaController(ramp_from="gated")
