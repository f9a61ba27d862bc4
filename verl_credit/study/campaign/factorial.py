"""Main effects and interactions of a factorial design with (seed, world) as block, by statsmodels."""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pandas as pd
from statsmodels.formula.api import ols
from statsmodels.stats.anova import anova_lm
from statsmodels.stats.multitest import multipletests

from verl_credit.study.campaign.statistics import Runs


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
        return Factorial(
            (), 0, means, f"{len(blocks)} (seed, world) have runs of all conditions; 2 are needed"
        )
    table = pd.DataFrame(
        [
            {"y": values[c][block], "block": f"b{place}"}
            | {f"f{i}": levels[n][c] for i, n in enumerate(names)}
            for c in conditions
            for place, block in enumerate(blocks)
        ]
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
    effects = tuple(
        Effect(
            " x ".join(names[i] for i in term),
            int(row["df"]),
            *map(float, row[["sum_sq", "F", "PR(>F)"]]),
            float(p),
        )
        for term, row, p in zip(terms, rows, adjusted, strict=True)
    )
    return Factorial(effects, int(fit.df_resid), means)


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
