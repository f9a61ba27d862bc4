"""SEPA switched on to no effect: lambda that stays 0, and schedule=auto that is the linear ramp."""

from __future__ import annotations

import math

from verl_credit.credit.token.sepa_reach import auto_can_lead, first_auto_step, first_ramp_step


def sepa_without_effect(sepa: dict, steps: int, said: str) -> list[str]:
    """What changes nothing in a run of ``steps``. ``said``: where that number comes from."""
    auto = sepa["schedule"] == "auto"
    ramp, fall = first_ramp_step(sepa), first_auto_step(sepa) if auto else math.inf
    first = min(ramp, fall)
    if first == math.inf:
        return [f"algorithm.sepa.steps={sepa['steps']}, schedule={sepa['schedule']}: lambda is 0 for ever"]
    if first > steps:
        return [f"algorithm.sepa: lambda is 0 until step {first}, and {said}"]
    if auto and not auto_can_lead(sepa, steps):
        when = "never" if fall == math.inf else f"from step {fall} on at the earliest"
        return [
            f"algorithm.sepa.schedule=auto: lambda is the linear ramp's in every step, and {said}; with warmup="
            f"{sepa['warmup']}, ema_decay={sepa['ema_decay']:g} and var_threshold={sepa['var_threshold']:g} the fall of the "
            f"variance can act {when}, and counts only above the ramp. A smaller decay or warm-up, or steps=0"
        ]
    return []
