"""The earliest step at which SEPA's lambda can act, from its settings."""

from __future__ import annotations

import math

from verl_credit.credit.token.sepa_controller import EPS, SepaController


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
    """Whether auto can exceed the linear ramp in one of steps 1..`steps`; if not, it changes no step.

    The published ramp runs from the start; one that runs from the gate is assumed to begin late enough.
    """
    first = first_auto_step(sepa)
    if first > steps:
        return False
    if sepa["ramp_from"] == "gate" and sepa["correct_rate_gate"] > 0:
        return True
    ramp = SepaController(**{**sepa, "schedule": "linear", "correct_rate_gate": 0.0})
    decay, threshold = sepa["ema_decay"], max(sepa["var_threshold"], EPS)
    return any(
        1 - decay ** (step - 1 - max(sepa["warmup"], 1)) / threshold > ramp.lam(step)
        for step in range(int(first), steps + 1)
    )
