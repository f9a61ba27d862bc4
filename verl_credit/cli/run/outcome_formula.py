"""The outcome term that a turn mode runs, in words for `explain`."""

from __future__ import annotations

from verl_credit.credit.operator import leave_one_out_factor
from verl_credit.credit.turn.mode import TurnMode


def outcome_formula(mode: TurnMode, told: dict) -> str | None:
    """What R is under a turn mode when ``advantage_mode`` is grpo; None where the mode does not say."""
    if mode.without_gains.factor is leave_one_out_factor:
        return "R_i = r_i - mean of the others' r; nothing is divided by a std"
    options = {**mode.options, **told}
    if not {"norm_by_std", "ddof", "variance_floor", "eps"} <= set(options):
        return None
    if not options["norm_by_std"]:
        return "R_i = r_i - mean(r); nothing is divided by a std"
    floor = f" + {options['variance_floor']:g}" if options["variance_floor"] else ""
    over = f"n - {options['ddof']}" if options["ddof"] else "n"
    return (
        f"R_i = (r_i - mean(r)) / (sqrt(sum((r - mean(r))^2) / ({over}){floor}) + {options['eps']:g}), n rows"
    )
