"""The own cosine of rows of the table of credits, on two policies of the lab: one measurement for all rows."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from verl_credit.recipe.compose import load_config
from verl_credit.recipe.world import world_of
from verl_credit.records.run.progress_line import Throttled, say_at_once
from verl_credit.study.bench import on_two_policies
from verl_credit.study.fidelity.gradients import GRPO
from verl_credit.study.stats import Measure
from verl_credit.study.table_row import GROUP, Measured, Row

OWN = "own cosine"
SIZE = {"prompts": 32, "continuations": 16}


def measure_cosines(rows: Sequence[Row], folder: Path, work: Path) -> None:
    """Adds the column of rows that lack it to the folder. ``work`` keeps the later policy and the true values."""
    missing = [row for row in rows if OWN not in Measured.of(row, folder).columns]
    for row in missing:
        if why := _not_here(row):
            Measured.of(row, folder).add(OWN, {"why": why})
    missing = [row for row in missing if not _not_here(row)]
    if not missing:
        return
    begun, base = time.process_time(), load_config("lab", ["algorithm.info_gain_norm_mode=none"])
    world_of(base).build(Throttled(say_at_once))
    also = {row.name: load_config("lab", row.overrides()) for row in missing if row.name != "none"}
    found: dict[str, dict] = {row.name: {} for row in missing}
    for policy, result in on_two_policies(base, work, also=also, **SIZE):
        reasons = {credit.name: credit.reason for credit, _ in result.credits if credit.reason}
        for name, of_row in found.items():
            credit = GRPO if name == "none" else name
            agreement = result.gradients.get(credit)
            if agreement is None:
                of_row[policy] = {"why": reasons[credit]}
            else:
                measures = {"own": agreement.own, "minus GRPO's": agreement.own_difference}
                of_row[policy] = {key: _numbers(one) for key, one in measures.items()}
    seconds = round((time.process_time() - begun) / len(missing), 1)
    for row in missing:
        settings = SIZE | {"rollouts": GROUP}
        Measured.of(row, folder).add(
            OWN, {"settings": settings, "policies": found[row.name], "cpu_seconds": seconds}
        )


def _not_here(row: Row) -> str:
    """Why a run of the lab cannot have the row's credit; "" where it can."""
    if row.group != GROUP:
        return f"the lab is at n {GROUP}"
    return "no run has true values" if row.values == "true" else ""


def _numbers(measure: Measure) -> list[float | None]:
    """[value, low, high]; None where it is not defined."""
    numbers = measure.value, measure.low, measure.high
    return [None if one is None else round(one, 4) for one in numbers]


def shown_cosine(measured: dict, difference: bool) -> str:
    """The start's and the later policy's, minus GRPO's if ``difference``."""
    return "; ".join(_shown(of, difference) for of in measured["policies"].values())


def _shown(of_policy: dict, difference: bool) -> str:
    if "why" in of_policy:
        return of_policy["why"]
    value, low, high = of_policy["minus GRPO's" if difference else "own"]
    if value is None:
        return "undefined"
    text = f"{value:+.3f}" if difference else f"{value:.3f}"
    return text if low is None else f"{text} ± {(high - low) / 2:.3f}"
