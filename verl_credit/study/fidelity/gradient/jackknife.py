"""Products of means by U-statistics over prompts, and intervals by leaving out one prompt at a time.

Everything here is an array [1 + P]: by all P prompts, then without each of them.
"""

from __future__ import annotations

import numpy as np

from verl_credit.study.fidelity.measures import Measure

_NORMAL = 1.959964


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
    half = _NORMAL * np.sqrt((n - 1) / n * ((without_P - without_P.mean()) ** 2).sum())
    return Measure(float(whole), float(whole - half), float(whole + half), n)


def prompts_for(measure: Measure, half_width: float = 0.05) -> int | None:
    """Prompts that an interval of +- ``half_width`` takes, by the width found here: it shrinks with sqrt(P).

    None where there is no interval.
    """
    if measure.low is None:
        return None
    return int(np.ceil(measure.n * ((measure.high - measure.low) / (2 * half_width)) ** 2))
