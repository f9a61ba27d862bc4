"""Numbers with their intervals: prompts, which share nothing, are drawn again (bootstrap) or left out (jackknife)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

RESAMPLES = 1000


@dataclass(frozen=True)
class Measure:
    """``low``, ``high``: 95 % by bootstrap over prompts. None: not defined."""

    value: float | None
    low: float | None = None
    high: float | None = None
    n: int = 0


def prompt_weights(prompts: int, resamples: int) -> np.ndarray:
    """[1 + resamples, prompts]: the sample itself, then how often each prompt is drawn."""
    draws = np.random.default_rng(0).integers(prompts, size=(resamples, prompts))
    counts = [np.bincount(draw, minlength=prompts) for draw in draws]
    return np.stack([np.ones(prompts, dtype=int), *counts])


def with_interval(values: np.ndarray, n: int) -> Measure:
    """``values`` of the sample itself, then of each resample. Undefined resamples are left out."""
    own, drawn = values[0], values[1:][np.isfinite(values[1:])]
    if not np.isfinite(own):
        return Measure(None, n=n)
    low, high = np.quantile(drawn, [0.025, 0.975]).tolist() if len(drawn) else (None, None)
    return Measure(float(own), low, high, n)


def product_of_means(gram_P_P: np.ndarray) -> np.ndarray:
    """E[x] . E[y], unbiased, from the products x_p . y_q of the prompts' vectors, [1 + P].

        U = 1 / (P (P - 1)) sum over p != q of x_p . y_q

    A prompt's product with itself is left out: it holds the noise that x_p and y_p share. Needs three prompts.
    """
    prompts = len(gram_P_P)
    own_P = np.diag(gram_P_P)
    whole = gram_P_P.sum() - own_P.sum()
    without_P = whole - gram_P_P.sum(0) - gram_P_P.sum(1) + 2 * own_P
    return np.concatenate([[whole / (prompts * (prompts - 1))], without_P / ((prompts - 1) * (prompts - 2))])


def mean_without(value_P: np.ndarray) -> np.ndarray:
    """The mean over prompts, [1 + P]."""
    total, prompts = value_P.sum(), len(value_P)
    return np.concatenate([[total / prompts], (total - value_P) / (prompts - 1)])


def root(square_1P: np.ndarray) -> np.ndarray:
    """A norm from the estimate of its square; NaN where that is not positive."""
    return np.sqrt(np.where(square_1P > 0, square_1P, np.nan))


def interval(value_1P: np.ndarray) -> Measure:
    """The first value with its 95 % interval by the jackknife:  se^2 = (P - 1) / P sum over p of (v_-p - mean)^2.

    ``n`` is the number of prompts. None for a value that is not defined; no interval where it is not without some prompt.
    """
    whole, without_P = value_1P[0], value_1P[1:]
    n = len(without_P)
    if not np.isfinite(whole):
        return Measure(None, n=n)
    if not np.isfinite(without_P).all():
        return Measure(float(whole), n=n)
    normal = 1.959964  # 95 % of a normal distribution are within so many standard errors
    half = normal * np.sqrt((n - 1) / n * ((without_P - without_P.mean()) ** 2).sum())
    return Measure(float(whole), float(whole - half), float(whole + half), n)


def prompts_for(measure: Measure, half_width: float = 0.05) -> int | None:
    """Prompts that an interval of +- ``half_width`` takes, by the present width: it shrinks with sqrt(P).

    None where there is no interval.
    """
    if measure.low is None:
        return None
    return int(np.ceil(measure.n * ((measure.high - measure.low) / (2 * half_width)) ** 2))
