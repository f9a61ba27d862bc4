"""Can the values be trusted? Statistics that are 0 on average, and sampled texts against their exact probabilities."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from verl_credit.study.fidelity.scored import ScoredTurn


@dataclass(frozen=True)
class ZScore:
    """Of a mean that is 0; None where fewer than two prompts differ."""

    name: str
    mean: float
    z: float | None
    n: int


def martingale(turns: Sequence[ScoredTurn]) -> list[ZScore]:
    """Mean A* by turn number, and mean r - V(s_0): V is a martingale, so both are 0.

    Over all turns of a number, the ending ones with r - V among them: over tool turns alone the mean is not 0, because which
    turns are tool turns is the policy's choice. Standard errors are over prompts, whose turns share values.
    """
    numbers = sorted({turn.turn for turn in turns})
    found = [
        _z(f"turn {number + 1}", [(turn.prompt, turn.a_star) for turn in turns if turn.turn == number])
        for number in numbers
    ]
    whole: dict[tuple[int, int], float] = {}
    for turn in turns:
        key = turn.prompt, turn.trajectory
        whole[key] = whole.get(key, 0.0) + turn.a_star
    return [*found, _z("r - V(s_0)", [(prompt, total) for (prompt, _), total in whole.items()])]


def _z(name: str, values: Sequence[tuple[int, float]]) -> ZScore:
    """The prompts' sums are independent, with mean 0 each:  z = sum_p S_p / sqrt(sum_p S_p^2)."""
    sums: dict[int, float] = {}
    for prompt, value in values:
        sums[prompt] = sums.get(prompt, 0.0) + value
    total, square = sum(sums.values()), sum(s * s for s in sums.values())
    z = total / square**0.5 if square > 0 and len(sums) > 1 else None
    return ZScore(name, total / len(values), z, len(values))


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


def text_fit(counts: Mapping, probabilities: Mapping, least: float = 5.0) -> Fit:
    """Sampled texts against their exact probabilities. Texts of fewer than ``least`` expected samples are one cell.

    Raises ValueError for a sampled text of probability 0, and where fewer than two cells are left.
    """
    if unknown := [text for text in counts if not probabilities.get(text)]:
        raise ValueError(f"sampled {unknown[0]!r}, whose probability is 0")
    n = sum(counts.values())
    cells, rest = [], [0.0, 0.0]
    for text, p in probabilities.items():
        cell = counts.get(text, 0), n * p
        if cell[1] >= least:
            cells.append(cell)
        else:
            rest = [a + b for a, b in zip(rest, cell, strict=True)]
    if rest[1] > 0:
        cells.append(tuple(rest))
    if len(cells) < 2:
        raise ValueError(f"{n} samples leave {len(cells)} cell of {least:g} expected samples; expected two")
    observed, expected = np.array(cells, dtype=np.float64).T
    return Fit(float(((observed - expected) ** 2 / expected).sum()), len(cells) - 1)
