"""A number with its interval by drawing prompts again: turns of one prompt share values, prompts share nothing."""

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


def prompt_weights(prompts: int, resamples: int = RESAMPLES, seed: int = 0) -> np.ndarray:
    """[1 + resamples, prompts]: the sample itself, then how often each prompt is drawn."""
    draws = np.random.default_rng(seed).integers(prompts, size=(resamples, prompts))
    counts = [np.bincount(draw, minlength=prompts) for draw in draws]
    return np.stack([np.ones(prompts, dtype=int), *counts])


def with_interval(values: np.ndarray, n: int) -> Measure:
    """``values``: by the sample itself, then by each resample. Resamples in which nothing is defined are left out."""
    own, drawn = values[0], values[1:][np.isfinite(values[1:])]
    if not np.isfinite(own):
        return Measure(None, n=n)
    low, high = np.quantile(drawn, [0.025, 0.975]) if len(drawn) else (None, None)
    return Measure(float(own), None if low is None else float(low), None if high is None else float(high), n)
