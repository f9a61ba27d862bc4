"""SEPA's pooling strength: a ramp over steps, a gate on the share of correct outcomes, a variance schedule."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass

from verl_credit.credit.arguments import check_name
from verl_credit.credit.operator import Range
from verl_credit.lazy import torch

SCHEDULES = ("linear", "auto")
RAMPS = ("start", "gate")
STATE = ("var_ema", "var_0", "warmup_seen", "gate_open", "gate_step", "last_step")
EPS = 1e-8
LARGEST = math.sqrt(sys.float_info.max)  # the square of a larger number, and then the mean, is inf


@dataclass(kw_only=True, eq=False)
class SepaController:
    """Computes lambda of a step from the observations of earlier steps.

        linear(s) = clip((s - delay_steps) / steps, 0, 1)                  0 if steps is 0
        auto      = 1 - min(1, (ema / var_0) / var_threshold)              0 until var_0 is set
        lambda(s) = 0 while the gate is closed, else linear(s) | max(auto, linear(s))    (schedule)

    `observe` is called once per step, with the share of outcomes above 0.5 and with the uncertainties of the step's
    execution tokens. The share opens the gate permanently when it reaches `correct_rate_gate` (0: open from the start).
    The population variance of the uncertainties feeds an exponential mean `ema` (decay `ema_decay`, in steps); var_0 is
    its value after `warmup` steps. So auto stays 0 until the variance falls below var_threshold of var_0, and is 1
    without variance.

    ramp_from="start" is published: the ramp runs while the gate is closed, so a late opening makes lambda jump.
    "gate" measures s from the step that opened the gate, delay included.
    Departures: one observation per step (the published code observes every completion, so that its 50 steps of
    warm-up end within the first step); settings are saved and compared on load.
    """

    steps: int = 500
    schedule: str = "linear"
    delay_steps: int = 50
    correct_rate_gate: float = 0.1
    ema_decay: float = 0.99
    var_threshold: float = 0.2
    warmup: int = 50
    ramp_from: str = "start"

    def __post_init__(self) -> None:
        self.settings = vars(self).copy()
        check_name("schedule", self.schedule, SCHEDULES)
        check_name("ramp_from", self.ramp_from, RAMPS)
        for name in ("steps", "delay_steps", "warmup"):
            Range(0).check(name, self.settings[name])
        for name in ("correct_rate_gate", "ema_decay", "var_threshold"):
            Range(0.0, 1.0, high_allowed=True).check(name, self.settings[name])
        self.var_ema: float | None = None
        self.var_0: float | None = None
        self.warmup_seen = 0
        self.gate_open = self.correct_rate_gate <= 0
        self.gate_step = 0 if self.gate_open else None
        self.last_step: int | None = None

    def lam(self, step: int) -> float:
        """lambda for this step, in [0, 1]."""
        if not self.gate_open:
            return 0.0
        start = self.delay_steps + ((self.gate_step or 0) if self.ramp_from == "gate" else 0)
        linear = min(max((step - start) / self.steps, 0.0), 1.0) if self.steps else 0.0
        if self.schedule == "linear" or self.var_0 is None or self.var_ema is None:
            return linear
        ratio = max(0.0, self.var_ema / max(self.var_0, EPS))
        auto = 1.0 - min(ratio / max(self.var_threshold, EPS), 1.0)
        return max(linear, auto)

    def observe(self, step: int, correct_rate: float, execution_uncertainty: torch.Tensor) -> None:
        """Record this step's observations, which affect later steps. Each step may be observed once.

        Ignored: rates and uncertainties that are not finite, and uncertainties that are negative or too large to square.
        """
        Range(0).check("step", step)
        if self.last_step is not None and step <= self.last_step:
            raise ValueError(f"step {step} was observed already (the last one was {self.last_step})")
        self.last_step = step
        if not self.gate_open and math.isfinite(correct_rate) and correct_rate >= self.correct_rate_gate:
            self.gate_open, self.gate_step = True, step
        values = execution_uncertainty.detach().to(torch.float64).flatten()
        values = values[(values >= 0) & (values <= LARGEST)]
        if not values.numel():
            return
        variance, decay = float(values.var(correction=0)), self.ema_decay
        self.var_ema = variance if self.var_ema is None else decay * self.var_ema + (1 - decay) * variance
        if self.var_0 is None:
            self.warmup_seen += 1
            if self.warmup_seen >= self.warmup:
                self.var_0 = max(self.var_ema, EPS)

    def metrics(self, step: int) -> dict[str, float]:
        return {"sepa_lambda": self.lam(step), "sepa_gate_open": float(self.gate_open)}

    def state_dict(self) -> dict:
        """Settings and state, ready for JSON."""
        return {"settings": self.settings, "state": {name: getattr(self, name) for name in STATE}}

    def load_state_dict(self, saved: dict) -> None:
        """Restore a saved state. Raises ValueError for other settings."""
        settings = saved["settings"]
        differing = [
            f"{name} was {settings[name]!r}, is {value!r}"
            for name, value in self.settings.items()
            if settings[name] != value
        ]
        if differing:
            raise ValueError(f"the SEPA state was saved under other settings: {'; '.join(differing)}")
        for name, value in saved["state"].items():
            setattr(self, name, value)


def first_ramp_step(sepa: dict) -> float:
    """The first step with linear(s) > 0, the gate open from the start; infinity for a ramp of no steps."""
    return sepa["delay_steps"] + 1 if sepa["steps"] > 0 else math.inf


def first_auto_step(sepa: dict) -> float:
    """The first step (counted from 1) with auto(s) > 0, if the variance is 0 in every step after the warm-up.

        s = warmup + 1 + k,  k the smallest whole number with ema_decay^k < var_threshold

    Step s uses the observations of s - 1 steps. No mean falls faster than that of zeros, so no run is earlier (except
    one whose variance is 0 during the warm-up already, which has nothing to pool). Infinity at decay 1.
    """
    decay, threshold = sepa["ema_decay"], max(sepa["var_threshold"], EPS)
    if decay >= 1:
        return math.inf
    k = max(1, math.floor(math.log(threshold) / math.log(decay))) if decay > 0 else 1
    while decay**k >= threshold:
        k += 1
    return max(sepa["warmup"], 1) + 1 + k


def auto_can_lead(sepa: dict, steps: int) -> bool:
    """Returns whether auto can exceed the linear ramp in one of steps 1..`steps`; if not, it changes no step.

    The published ramp runs from the start; one that runs from the gate is assumed to begin late enough.
    """
    first = first_auto_step(sepa)
    if first > steps or (sepa["ramp_from"] == "gate" and sepa["correct_rate_gate"] > 0):
        return first <= steps
    ramp = SepaController(**{**sepa, "schedule": "linear", "correct_rate_gate": 0.0})
    decay, threshold = sepa["ema_decay"], max(sepa["var_threshold"], EPS)
    return any(
        1 - decay ** (step - 1 - max(sepa["warmup"], 1)) / threshold > ramp.lam(step)
        for step in range(int(first), steps + 1)
    )
