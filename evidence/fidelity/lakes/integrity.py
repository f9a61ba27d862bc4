"""Monte-Carlo values against those of dynamic programming."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from lakes.dynamic import ExactValue
from verl_credit.study.fidelity.values import Value

OPEN = 0.05
"""Values nearer to 0 or 1 are left out: their errors are not normal."""


@dataclass(frozen=True)
class Fit:
    """Pearson's chi-square of counts; on average it is its degrees of freedom."""

    chi_square: float
    degrees: int

    @property
    def z(self) -> float:
        """Of the chi-square by Wilson and Hilferty's cube root: about standard normal."""
        k = self.degrees
        return ((self.chi_square / k) ** (1 / 3) - (1 - 2 / (9 * k))) / (2 / (9 * k)) ** 0.5


@dataclass(frozen=True)
class Agreement:
    """z = (V by Monte Carlo - V) / sqrt(V (1 - V) / M) of each context: mean 0 and standard deviation 1, if all is right."""

    contexts: int
    mean: float
    sd: float
    fit: Fit
    """The sum of z^2, on average as many as there are contexts."""
    shift: float
    """Mean V by Monte Carlo - V."""
    error: float
    """sqrt(mean (V by Monte Carlo - V)^2 - mean variance by V): how far one is from the other beyond the noise."""

    @property
    def z_of_mean(self) -> float:
        return self.mean * self.contexts**0.5


def compare(found: Mapping[str, Value], exact: Mapping[str, ExactValue]) -> Agreement:
    """Of the contexts that both have. Raises ValueError where there are none with a value between 0 and 1."""
    pairs = [(found[name], exact[name].value) for name in found if name in exact]
    pairs = [(value, v) for value, v in pairs if OPEN < v < 1 - OPEN]
    if not pairs:
        raise ValueError(f"no context with a value between {OPEN} and {1 - OPEN} among {len(found)}")
    v = np.array([v for _, v in pairs])
    difference = np.array([value.value for value, _ in pairs]) - v
    variance = v * (1 - v) / np.array([value.continuations for value, _ in pairs])
    z = difference / variance**0.5
    beyond = max(0.0, float((difference**2 - variance).mean()))
    return Agreement(
        len(z),
        float(z.mean()),
        float(z.std()),
        Fit(float((z**2).sum()), len(z)),
        float(difference.mean()),
        beyond**0.5,
    )
