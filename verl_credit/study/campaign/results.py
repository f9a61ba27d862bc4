"""The numbers of a campaign's folder: areas per condition, declared comparisons with verdicts, and main effects and
interactions of a factorial design with (seed, world) as block, by statsmodels."""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
from statsmodels.formula.api import ols
from statsmodels.stats.anova import anova_lm
from statsmodels.stats.multitest import multipletests

from verl_credit.study.campaign.file import Campaign
from verl_credit.study.campaign.record import read_record
from verl_credit.study.campaign.state import RunState, State, states
from verl_credit.study.campaign.statistics import (
    Comparison,
    Mean,
    Runs,
    compare,
    holm,
    mean,
    pairs_needed,
    verdict,
)


@dataclass(frozen=True)
class Effect:
    """A line of the table: ``name`` is a factor, or several joined by " x "."""

    name: str
    df: int
    sum_sq: float
    f: float
    p: float
    p_holm: float


@dataclass(frozen=True)
class Factorial:
    effects: tuple[Effect, ...]
    df_residual: int
    level_means: dict[str, dict[str, float]]
    """Factor to level to the mean of its runs' values."""
    why: str = ""
    """Why there is no table."""


@dataclass(frozen=True)
class Judged:
    comparison: Comparison
    needed: int | str
    verdict: str


@dataclass(frozen=True)
class Results:
    folder: Path
    campaign: Campaign
    added: list[dict]
    states: list[RunState]
    means: dict[str, Mean]
    """Condition to the mean of its runs' areas."""
    judged: list[Judged]
    """The declared comparisons."""
    factorial: Factorial | None

    @property
    def done(self) -> int:
        return sum(one.state is State.DONE for one in self.states)

    @property
    def hours(self) -> float:
        return sum(one.hours for one in self.states)


def results(folder: Path) -> Results:
    """Raises FileNotFoundError where no campaign was started, ConfigError for a damaged record."""
    record = read_record(folder)
    campaign, runs = record.campaign, states(record.campaign, folder)
    values = {name: {} for name in campaign.conditions}
    for one in runs:
        if one.value is not None:
            values[one.run.condition][one.run.block] = one.value
    family = campaign.pairs()
    compared = holm([compare(a, b, values[a], values[b]) for a, b in family])
    n, higher = len(family), campaign.metric.higher_is_better
    judged = [
        Judged(c, pairs_needed(c, n), verdict(c, n, higher, *_absent(runs, c.a, c.b))) for c in compared
    ]
    table = factorial(campaign.levels(), values) if campaign.factors else None
    means = {name: mean(list(of.values())) for name, of in values.items()}
    return Results(folder, campaign, record.added, runs, means, judged, table)


def _absent(runs: list[RunState], a: str, b: str) -> tuple[int, int]:
    """(pairs that are still to come, pairs that never come: a run of them failed, or has no number)"""
    pending: set[tuple] = set()
    never: set[tuple] = set()
    for one in runs:
        if one.run.condition in (a, b) and one.value is None:
            over = one.state in (State.FAILED, State.DAMAGED, State.DONE)
            (never if over else pending).add(one.run.block)
    return len(pending - never), len(never)


def factorial(levels: Mapping[str, Mapping[str, str]], values: Mapping[str, Runs]) -> Factorial:
    """``levels``: factor to condition to level. ``values``: condition to its runs.

        value = factors, their interactions, block (seed, world); sums of squares of type II; F tests

    p_holm: Holm over the effects of this table. F tests suppose normal residuals of one variance. Blocks that lack a
    condition are left out: every effect is measured within blocks. No table is made without two whole blocks, nor for
    values that the model explains without a remainder.
    """
    names = list(levels)
    conditions = list(next(iter(levels.values())))
    blocks = sorted(set.intersection(*(set(values.get(c, {})) for c in conditions)), key=repr)
    means = _level_means(levels, values, blocks)
    if len(blocks) < 2:
        why = f"{len(blocks)} (seed, world) have runs of all conditions; 2 are needed"
        return Factorial((), 0, means, why)
    cells = {c: {f"f{i}": levels[n][c] for i, n in enumerate(names)} for c in conditions}
    places = [(c, place, block) for c in conditions for place, block in enumerate(blocks)]
    table = pd.DataFrame(
        [{"y": values[c][block], "block": f"b{place}", **cells[c]} for c, place, block in places]
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fit = ols("y ~ " + " * ".join(f"C(f{i})" for i in range(len(names))) + " + C(block)", table).fit()
        if fit.ssr <= 1e-20 or fit.df_resid < 1:
            return Factorial((), int(fit.df_resid), means, "the runs do not differ beyond factors and blocks")
        table_of_f = anova_lm(fit, typ=2)
    terms = [t for k in range(1, len(names) + 1) for t in itertools.combinations(range(len(names)), k)]
    rows = [table_of_f.loc[":".join(f"C(f{i})" for i in term)] for term in terms]
    if not all(math.isfinite(row["PR(>F)"]) for row in rows):
        return Factorial((), int(fit.df_resid), means, "a combination of levels has no condition")
    adjusted = multipletests([row["PR(>F)"] for row in rows], method="holm")[1]
    titles = [" x ".join(names[i] for i in term) for term in terms]
    effects = [
        Effect(title, int(row["df"]), *map(float, row[["sum_sq", "F", "PR(>F)"]]), float(p))
        for title, row, p in zip(titles, rows, adjusted, strict=True)
    ]
    return Factorial(tuple(effects), int(fit.df_resid), means)


def _level_means(
    levels: Mapping[str, Mapping[str, str]], values: Mapping[str, Runs], blocks: Sequence
) -> dict[str, dict[str, float]]:
    means: dict[str, dict[str, float]] = {}
    for name, of in levels.items():
        for level in dict.fromkeys(of.values()):
            numbers = [values[c][b] for c in of if of[c] == level for b in blocks]
            if numbers:
                means.setdefault(name, {})[level] = sum(numbers) / len(numbers)
    return means
