"""The difference of two conditions by their runs, paired by (seed, world): scipy's and statsmodels' methods.

What is drawn at random is drawn with a fixed seed, and the order in which runs are given changes nothing."""

from __future__ import annotations

import math
import warnings
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy import stats
from statsmodels.stats.multitest import multipletests
from statsmodels.stats.power import TTestPower

from verl_credit.study.campaign.file import LEVEL, fewest_pairs

POWER = 0.8
RESAMPLES = 2**16 - 1  # sign flips: all of them up to 16 pairs, as many at random beyond
MOST_PAIRS = 10_000
_SAME = 1e-12  # values that differ by less are equal: sums of the same numbers in another order do

Runs = Mapping[Hashable, float]
"""A number for every (seed, world)."""


@dataclass(frozen=True)
class Mean:
    """A mean with its 95 % interval. Without an interval, ``why`` has the reason."""

    n: int
    mean: float | None
    low: float | None = None
    high: float | None = None
    why: str = ""


def mean(values: Sequence[float]) -> Mean:
    """The mean and its BCa bootstrap interval (Efron 1987; scipy.stats.bootstrap, 9,999 resamples).

    No interval for fewer than 3 values, nor for values that are all equal. With few values the interval is too narrow:
    of 5 normal values it holds the true mean in about 84 % of cases, not in 95 % (docs/campaigns.md).
    """
    x = np.sort(np.asarray(values, dtype=np.float64))
    if not np.isfinite(x).all():
        raise ValueError(f"not a number among the values: {x.tolist()}")
    if len(x) == 0:
        return Mean(0, None, why="no values")
    middle = float(x.mean())
    if len(x) < 3:
        return Mean(len(x), middle, why="an interval needs at least 3 values")
    if np.ptp(x) < _SAME:
        return Mean(len(x), middle, why="all values are equal")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # for a degenerate distribution, which is named below
        interval = stats.bootstrap((x,), np.mean, method="BCa", rng=0).confidence_interval
    if not (math.isfinite(interval.low) and math.isfinite(interval.high)):
        return Mean(len(x), middle, why="the bootstrap interval is not defined for these values")
    return Mean(len(x), middle, float(interval.low), float(interval.high))


@dataclass(frozen=True)
class Comparison:
    """``a`` minus ``b`` over the pairs that both have."""

    a: str
    b: str
    difference: Mean
    p: float | None
    """Two-sided, of the sign-flip test; None without pairs."""
    d_z: float | None
    why_no_d_z: str
    p_holm: float | None = None

    @property
    def n(self) -> int:
        return self.difference.n

    @property
    def smallest_p(self) -> float | None:
        """The smallest p that so many pairs can give: 2 / 2^n."""
        return 2.0 ** (1 - self.n) if self.n else None  # 2.0 / 2 ** n overflows from 1,024 pairs on


def compare(a: str, b: str, runs_a: Runs, runs_b: Runs) -> Comparison:
    """Paired by key. Under the null hypothesis, that the two names could be exchanged within every pair, each difference
    is as likely to have the other sign: p is the share of sign flips whose mean is at least as far from 0.

    d_z = mean(d) / std(d), with n - 1 (Cohen 1988).
    """
    keys = sorted(runs_a.keys() & runs_b.keys(), key=repr)
    d = np.sort(np.array([runs_a[key] - runs_b[key] for key in keys], dtype=np.float64))
    d_z, why = None, ""
    if len(d) < 2:
        why = "an effect size needs at least 2 pairs"
    elif np.ptp(d) < _SAME:
        why = "all differences are equal: their spread is not known"
    else:
        d_z = float(d.mean() / d.std(ddof=1))
    return Comparison(a, b, mean(d), _sign_flips(d) if len(d) else None, d_z, why)


def _sign_flips(d: np.ndarray) -> float:
    if np.abs(d).max() < _SAME or len(d) == 1:  # scipy needs two values; both signs of one are as far from 0
        return 1.0
    every = 2 ** len(d) <= RESAMPLES + 1
    draws = {"n_resamples": np.inf if every else RESAMPLES, "batch": 4096, "rng": 0}
    test = stats.permutation_test((d,), np.mean, permutation_type="samples", vectorized=True, **draws)
    return float(test.pvalue)


def holm(comparisons: Sequence[Comparison]) -> list[Comparison]:
    """The comparisons with Holm's (1979) adjusted p over all of them, the declared family. A comparison without pairs counts
    as p = 1, so that the family has its declared size from the first run on."""
    if not comparisons:
        return []
    adjusted = multipletests([1.0 if c.p is None else c.p for c in comparisons], method="holm")[1]
    return [
        replace(c, p_holm=None if c.p is None else float(p))
        for c, p in zip(comparisons, adjusted, strict=True)
    ]


def pairs_needed(comparison: Comparison, family: int) -> int | str:
    """Pairs (runs per arm) for 80 % power, were the true effect the observed d_z (statsmodels' TTestPower, two-sided, at
    the level of Holm's first step, 5 % / family), and never fewer than the sign-flip test needs. A text says why there is
    no number."""
    if comparison.d_z is None:
        return comparison.why_no_d_z
    effect, floor = min(abs(comparison.d_z), 3.0), fewest_pairs(family)  # far beyond, scipy gives no power
    alpha = LEVEL / family

    def power(pairs: int) -> float:
        return float(TTestPower().power(effect, pairs, alpha, alternative="two-sided"))

    if power(MOST_PAIRS) < POWER:
        return f"more than {MOST_PAIRS} pairs: the observed effect is next to nothing"
    if power(floor) >= POWER:
        return floor
    solved = TTestPower().solve_power(effect_size=effect, alpha=alpha, power=POWER, alternative="two-sided")
    return max(floor, math.ceil(float(np.squeeze(solved)) - 1e-9))


def verdict(
    c: Comparison, family: int, higher_is_better: bool = True, missing: int = 0, lost: int = 0
) -> str:
    """The comparison in words. ``missing``: declared pairs that are not there yet, before which nothing is decided.
    ``lost``: pairs that a failed run took away."""
    pair = f"{c.a} against {c.b}"
    if missing:
        return f"{pair}: not resolved yet: {missing} of {c.n + missing + lost} pairs are missing."
    failed = f", {lost} lost to failed runs" if lost else ""
    if c.p_holm is None:
        return f"{pair}: not resolved: there is no pair{failed}."
    numbers = f"p = {c.p_holm:.3f} after Holm over {family}, {c.n} pair{'s' * (c.n != 1)}{failed}"
    if c.p_holm <= LEVEL:
        better = c.a if (c.difference.mean > 0) == higher_is_better else c.b
        return f"{pair}: {better} is better ({numbers})."
    least, few = fewest_pairs(family), ""
    if c.n < least:
        few = f"With {c.n} pair{'s' * (c.n != 1)} it cannot be: p is {c.smallest_p:.3g} at best, before Holm; at least "
        few += f"{least} pairs are needed. "
    if isinstance(needed := pairs_needed(c, family), str):
        takes = f"How many it would take is not known: {needed}."
    else:
        observed = f"were the true effect the observed one (d_z = {c.d_z:+.2f})"
        takes = f"{needed} pairs would give 80 % power, {observed}."
    return f"{pair}: not resolved ({numbers}). {few}{takes}"
