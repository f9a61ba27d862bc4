"""Does a credit choose the better of a decision's alternatives? True values of the alternatives, order, and regret.

    Q(a)      V(s_{k+1}) after an alternative that searches, r of one that ends. A*(a) = Q(a) - V(s_k), and V(s_k) is the
              same for all alternatives of a decision: it cancels in everything here, and adds no error.
    pairs     share of the alternatives' pairs in the right order, of those whose Q differ by 4 standard errors; a tie of
              credit is one half
    searches  the same of pairs of two searches: which one, and not whether to search on
    within    correlation of credit and Q less their means over the decision, corrected for the noise of Q
    regret    Q(b) - Q(c): b is best by the first half of the continuations, c has the most credit (the mean over those that
              tie), and both are valued by the second half, so that chance in the choice of b does not raise its value. It is
              negative where c is better than b

Each twice, because an outcome depends on what came after the turn:

    one       credit from one completion after each alternative, as a training step gives it; mean over the completions
    mean      the mean credit over the completions: the chance of one completion mostly averages out, so that a wrong
              order is due to the credit itself

A credit that is affine in the outcome orders rightly in ``mean`` as completions grow, because its mean is affine in Q.
Intervals are by bootstrap over prompts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from verl_credit.study.fidelity.agreements import Agreements
from verl_credit.study.fidelity.scored import ScoredTurn
from verl_credit.study.fidelity.swap.decisions import Decision, as_turns, worth
from verl_credit.study.fidelity.values import Value, part_of
from verl_credit.study.stats import RESAMPLES, Measure, prompt_weights, with_interval

CreditOfDecisions = Sequence[np.ndarray]
"""An array [alternatives, completions] for each decision."""


@dataclass(frozen=True)
class Choice:
    pairs: Measure
    searches: Measure
    within: Measure
    regret: Measure


@dataclass(frozen=True)
class SwapAgreement:
    """The choices of a credit; see the module."""

    one: Choice
    mean: Choice


class SwapAgreements:
    """The true values of alternatives, prepared once; called with each credit."""

    def __init__(
        self,
        decisions: Sequence[Decision],
        values: Mapping[str, Value],
        completions: int,
        *,
        resamples: int = RESAMPLES,
    ):
        half = next(iter(values.values())).continuations // 2
        first, second = (part_of(values, part) for part in (slice(half), slice(half, None)))
        self._prompt = np.unique([d.prompt for d in decisions], return_inverse=True)[1]
        self._weights = prompt_weights(self._prompt.max() + 1, resamples)
        self._first, self._second = (
            [np.array([worth(a, some) for a in d.alternatives]) for d in decisions]
            for some in (first, second)
        )
        self._pairs = {
            (held_out, n): _Pairs(
                as_turns(decisions, values, second if held_out else values, n), held_out, resamples
            )
            for held_out in (False, True)
            for n in (1, completions)
        }

    @property
    def sure(self) -> tuple[int, int]:
        """Pairs of alternatives whose order is beyond doubt: of all, and of searches."""
        pairs = self._pairs[False, 1]
        return pairs.all.sure[0], pairs.searches.sure[0]

    def of(self, credit: CreditOfDecisions, *, held_out: bool = False) -> SwapAgreement:
        """``held_out``: made from the first half of the continuations, and compared with the second."""
        mean = [of_one.mean(axis=1, keepdims=True) for of_one in credit]
        return SwapAgreement(one=self._choice(credit, held_out), mean=self._choice(mean, held_out))

    def regret_of_draws(self, decisions: Sequence[Decision]) -> Measure:
        """The regret of what the policy does by itself: the mean over its draws."""
        times = [np.array([a.times for a in d.alternatives]) for d in decisions]
        return self._regret([n[:, None] / n.sum() for n in times])

    def _choice(self, credit: CreditOfDecisions, held_out: bool) -> Choice:
        flat = np.concatenate([of_one.T.ravel() for of_one in credit])
        pairs = self._pairs[held_out, credit[0].shape[1]]
        of_all, searches = pairs.all.of(flat), pairs.searches.of(flat[pairs.is_search])
        regret = self._regret([_chosen(of_one) for of_one in credit])
        return Choice(of_all.pairs, searches.pairs, of_all.same_turn, regret)

    def _regret(self, share: CreditOfDecisions) -> Measure:
        """``share``: how often each alternative is taken."""
        regret = [
            float(second @ (_chosen(first[:, None])[:, 0] - of_one.mean(axis=1)))
            for first, second, of_one in zip(self._first, self._second, share, strict=True)
        ]
        sums, counts = np.bincount(self._prompt, weights=regret), np.bincount(self._prompt)
        return with_interval((self._weights @ sums) / (self._weights @ counts), len(regret))


class _Pairs:
    """The agreement over all alternatives, and over the alternatives that search."""

    def __init__(self, turns: Sequence[ScoredTurn], one_half: bool, resamples: int):
        self.is_search = np.array([turn.after is not None for turn in turns])
        searches = [turn for turn in turns if turn.after is not None]
        self.all, self.searches = (
            Agreements(some, one_half=one_half, resamples=resamples) for some in (turns, searches)
        )


def _chosen(credit_A_C: np.ndarray) -> np.ndarray:
    """[alternatives, completions]: 1 for the alternative with the most credit, shared among ties."""
    tied = credit_A_C >= credit_A_C.max(axis=0) - 1e-9 * (1 + np.abs(credit_A_C).max(axis=0))
    return tied / tied.sum(axis=0)
