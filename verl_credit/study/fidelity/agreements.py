"""How well a credit agrees with the true advantages of turns; every number with a bootstrap interval over prompts.

    pearson     corr(advantage, A*) over tool turns / sqrt(reliability of A*)
    same turn   the same less both means over (prompt, turn number): what GRPO's groups alone cannot see
    pairs       share of a trajectory's pairs of tool turns in the right order, of those whose A* differ by 4 standard errors
    end pairs   the same for its ending turn beside each tool turn

A credit that is constant (over the tool turns, in every cell, in every sure pair) has neither correlation nor order: None.
Reliability is that of the mean of two halves with the correlation rho, 2 rho / (1 + rho) (Spearman-Brown). The noise of the
credit is not corrected: it is part of the credit.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from verl_credit.study.fidelity.true_values import ScoredTurn
from verl_credit.study.stats import RESAMPLES, Measure, prompt_weights, with_interval

SURE = 4.0
_CONSTANT = 1e-12
"""A variance or a correlation below it is rounding."""


@dataclass(frozen=True)
class Agreement:
    """The agreement of a credit; see the module."""

    pearson: Measure
    same_turn: Measure
    pairs: Measure
    end_pairs: Measure


class Agreements:
    """The true advantages, prepared once; called with the credit of each turn, in the turns' order.

    ``one_half``: they are those of one half of the continuations (`by_second_half`), whose reliability is the correlation
    of the halves itself.
    """

    def __init__(self, turns: Sequence[ScoredTurn], *, one_half: bool = False, resamples: int = RESAMPLES):
        self._one_half = one_half
        self._tool = np.array([turn.kind == "tool" for turn in turns], dtype=bool)
        self._prompt = _numbered([turn.prompt for turn in turns])
        self._prompts = int(self._prompt.max()) + 1
        self._star, *self._halves = (
            np.array([getattr(turn, name) for turn in turns]) for name in ("a_star", "a_first", "a_second")
        )
        self._cell = _numbered([(turn.prompt, turn.turn) for turn in turns if turn.kind == "tool"])
        pairs = sure_pairs(turns)
        self._pairs = [pair for pair in pairs if self._tool[list(pair)].all()]
        self._end_pairs = [pair for pair in pairs if not self._tool[list(pair)].all()]
        self.sure = len(self._pairs), len(self._end_pairs)
        """Pairs of turns whose order is beyond doubt: of tool turns, and with the ending turn."""
        self._weights = prompt_weights(self._prompts, resamples)

    def of(self, credit: Sequence[float]) -> Agreement:
        """``credit``: an advantage per turn, ending turns included."""
        credit_N = np.asarray(credit, dtype=np.float64)
        return Agreement(
            pearson=self._correlation(credit_N),
            same_turn=self._correlation(credit_N, self._cell),
            pairs=self._order(credit_N, self._pairs),
            end_pairs=self._order(credit_N, self._end_pairs),
        )

    @property
    def reliability(self) -> Measure:
        """The reliability of A* over tool turns."""
        reliability = self._reliability(*(half[self._tool] for half in self._halves))
        return with_interval(reliability, int(self._tool.sum()))

    def _correlation(self, credit_N: np.ndarray, cell: np.ndarray | None = None) -> Measure:
        x, star, *halves = _less_means([x[self._tool] for x in (credit_N, self._star, *self._halves)], cell)
        with np.errstate(invalid="ignore", divide="ignore"):
            r = self._pearson(x, star) / np.sqrt(self._reliability(*halves))
        return with_interval(r, len(x))

    def _reliability(self, first: np.ndarray, second: np.ndarray) -> np.ndarray:
        rho = self._pearson(first, second)
        with np.errstate(invalid="ignore", divide="ignore"):
            return np.where(rho > _CONSTANT, rho if self._one_half else 2 * rho / (1 + rho), np.nan)

    def _pearson(self, x: np.ndarray, y: np.ndarray) -> np.ndarray:
        """[1 + resamples], NaN where one of them is constant."""
        vx, vy, vxy = self._moments(x, y)
        with np.errstate(invalid="ignore", divide="ignore"):
            r = vxy / np.sqrt(vx * vy)
        return np.where((vx > _CONSTANT) & (vy > _CONSTANT), r, np.nan)

    def _moments(self, x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Both variances and the covariance, [1 + resamples] each."""
        prompt = self._prompt[self._tool]
        x, y = x - x.mean(), y - y.mean()  # against cancellation
        terms = np.stack([np.ones_like(x), x, y, x * x, y * y, x * y])
        sums = np.stack([np.bincount(prompt, weights=term, minlength=self._prompts) for term in terms])
        n, sx, sy, sxx, syy, sxy = sums @ self._weights.T
        with np.errstate(invalid="ignore", divide="ignore"):
            return sxx / n - (sx / n) ** 2, syy / n - (sy / n) ** 2, sxy / n - sx * sy / n**2

    def _order(self, credit_N: np.ndarray, pairs: Sequence[tuple[int, int]]) -> Measure:
        """A tie has the weight 0.5; when every pair ties there is no order."""
        if not pairs:
            return Measure(None)
        worse, better = np.array(pairs).T
        difference = credit_N[better] - credit_N[worse]
        tied = np.abs(difference) <= 1e-9 * (1 + np.abs(credit_N[better]))
        if tied.all():
            return Measure(None, n=len(worse))
        right = np.where(tied, 0.5, difference > 0)
        prompt = self._prompt[worse]
        ones = np.ones(len(worse))
        rights, counts = (np.bincount(prompt, weights=w, minlength=self._prompts) for w in (right, ones))
        with np.errstate(invalid="ignore", divide="ignore"):
            shares = (self._weights @ rights) / (self._weights @ counts)
        return with_interval(shares, len(worse))


def sure_pairs(turns: Sequence[ScoredTurn]) -> list[tuple[int, int]]:
    """Pairs (worse, better) of turns of a trajectory, as indices in ``turns``, whose A* are `SURE` standard errors apart.

    Neighbours share a value, V(s_{k+1}) = the end of one and the start of the next: in A*_{k+1} - A*_k it occurs twice, so
    that its variance is multiplied by four.
    """
    places: dict[tuple[int, int], list[int]] = {}
    for place, turn in enumerate(turns):
        places.setdefault((turn.prompt, turn.trajectory), []).append(place)
    pairs = []
    for of_one in places.values():
        for i, j in combinations(of_one, 2):
            a, b = turns[i], turns[j]
            variance = a.variance_before + a.variance_after + b.variance_before + b.variance_after
            if a.after is not None and a.after == b.before:
                variance += 2 * a.variance_after
            if abs(b.a_star - a.a_star) > SURE * variance**0.5:
                pairs.append((i, j) if b.a_star > a.a_star else (j, i))
    return pairs


def _less_means(tables: list[np.ndarray], cell: np.ndarray | None) -> list[np.ndarray]:
    """Less the mean of each cell; unchanged without cells."""
    if cell is None or not len(cell):
        return tables
    count = np.bincount(cell)
    return [x - (np.bincount(cell, weights=x) / count)[cell] for x in tables]


def _numbered(keys: Sequence[Hashable]) -> np.ndarray:
    """Numbers of the keys, in the order in which they first appear."""
    number = {key: place for place, key in enumerate(dict.fromkeys(keys))}
    return np.array([number[key] for key in keys], dtype=int)
