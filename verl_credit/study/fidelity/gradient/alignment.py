"""How well a mode's gradient agrees with grad E[r], by statistics in which no noise is multiplied with itself.

g_p is a prompt's credited gradient, h_p the same with the true advantages (so that E[h_p] is grad E[r], but for a factor),
h'_p that of independent rollouts of the same prompt. A batch b has the prompts that `draw_batches` gives it.

    bias             E[g] . E[h] / sqrt(|E[g]|^2 |E[h]|^2)                 each by a U-statistic over different prompts
    signal to noise  |E[g]|^2 / trace Cov[g_b]                             0.5: the noise is twice as long, squared
    step cos         mean over b of g_b . h / |g_b|, / sqrt(|E[h]|^2)      h: the mean over prompts that are not in b
    own cos          mean over b of g_b . h'_b / |g_b|, / sqrt(mean over b of |E[h'_b | its prompts]|^2)

The last two are corrected for the noise of h and h'. In the numerator it is independent of g_b and averages out. The squared
lengths are estimated without it (`product_of_means`, `square_of_means`). The noise of g_b is not corrected: a training step
has it. The length |E[h'_b]| is one number for all batches, because it is not known well of one batch. So own cos is the
mean of the batches' cosines, weighted by their |E[h'_b]|.

`token-mean` divides a batch's gradient by its tokens. That changes no cosine of a batch. Signal to noise has it to first
order. Bias leaves it out: it adds a term of the order Cov(g_p, tokens of p) / batch_prompts to E[g_b].

Intervals are the jackknife's over prompts: everything is taken again without each prompt, from the batches that lack it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from verl_credit.study.fidelity.gradient.batches import (
    along_others,
    along_own,
    draw_batches,
    length_of_batches,
    mean_over_batches,
)
from verl_credit.study.fidelity.gradient.jackknife import interval, mean_without, product_of_means, root
from verl_credit.study.fidelity.gradient.sums import PromptSums
from verl_credit.study.fidelity.measures import Measure

BATCH_PROMPTS = 16


@dataclass(frozen=True)
class GradientAgreement:
    """Of one mode; ``n`` is the number of prompts.

    Undefined where credit is 0 everywhere and where the estimate of a squared length is not positive. The cosines of batches
    need two prompts more than a batch has.
    """

    bias: Measure
    signal_to_noise: Measure
    """Where |E[g]|^2 is not estimated above 0 the value is None, and the interval is still given."""
    step: Measure
    step_difference: Measure
    """To the mode `none`, paired by batch."""
    own: Measure
    own_difference: Measure


class Alignment:
    """The true gradients, prepared once; called with each mode's.

    ``true``: of the rollouts that the modes credit; ``replicate``: of other rollouts of the same prompts, with its
    ``square_P``; ``tokens_P``: of the credited rollouts; ``none``: credited by the mode that differences are taken to.
    """

    def __init__(
        self,
        true: PromptSums,
        replicate: PromptSums,
        tokens_P: np.ndarray,
        none: PromptSums,
        *,
        batch_prompts: int = BATCH_PROMPTS,
        seed: int = 0,
    ):
        self._true, self._replicate, self._tokens_P = true, replicate, tokens_P
        self._size, self._prompts = batch_prompts, len(tokens_P)
        if self._prompts < 3:
            raise ValueError(f"{self._prompts} prompts; expected at least 3, of which the jackknife leaves 2")
        if replicate.square_P is None:
            raise ValueError("replicate.square_P is None; expected the sums of `true_credit`")
        h_P_S = true.both_P_S
        self._true_square_1P = product_of_means(h_P_S @ h_P_S.T)
        if self._prompts >= batch_prompts + 2:
            self._member_R_P = draw_batches(self._prompts, batch_prompts, seed)
            self._own_square_1P = self._square_of_own_batches()
            self._none = self._along(none)

    def of(self, credited: PromptSums) -> GradientAgreement:
        g_P_S, h_P_S = credited.both_P_S, self._true.both_P_S
        gram_P_P = g_P_S @ g_P_S.T
        square_1P = product_of_means(gram_P_P)
        bias_1P = product_of_means(g_P_S @ h_P_S.T) / root(square_1P) / root(self._true_square_1P)
        return GradientAgreement(
            interval(bias_1P), self._signal_to_noise(gram_P_P, square_1P), *self._cosines(credited)
        )

    def _signal_to_noise(self, gram_P_P: np.ndarray, square_1P: np.ndarray) -> Measure:
        """B |E[g_p]|^2 / trace Cov[g_p - R n_p]  with B prompts a batch, n_p tokens, R = sum g / sum n."""
        if not np.diag(gram_P_P).any():
            return Measure(None, n=self._prompts)
        with np.errstate(invalid="ignore", divide="ignore"):  # one prompt alone has credit: none without it
            found = interval(self._size * square_1P / variance_of_ratio(gram_P_P, self._tokens_P))
        positive = found.value is not None and found.value > 0
        return found if positive else Measure(None, found.low, found.high, found.n)

    def _cosines(self, credited: PromptSums) -> list[Measure]:
        """Step cosine, its difference, own cosine, its difference."""
        if self._prompts < self._size + 2:
            return [Measure(None, n=self._prompts)] * 4
        norms = root(self._true_square_1P), root(self._own_square_1P)
        found = []
        for mode, none, norm_1P in zip(self._along(credited), self._none, norms, strict=True):
            found += [interval(mean_over_batches(along) / norm_1P) for along in (mode, mode - none)]
        return found

    def _along(self, credited: PromptSums) -> tuple[np.ndarray, np.ndarray]:
        """[R, 1 + P] each: along grad E[r] of the other prompts, and of the batch's own."""
        g_P_S, h = credited.both_P_S, self._replicate
        length_R = length_of_batches(g_P_S @ g_P_S.T, self._member_R_P)
        others = along_others(g_P_S @ self._true.both_P_S.T, length_R, self._member_R_P)
        cross_P_P = credited.first_P_S @ h.second_P_S.T
        if not credited.held_out:
            cross_P_P = (cross_P_P + credited.second_P_S @ h.first_P_S.T) / 2
        return others, along_own(cross_P_P, length_R, self._member_R_P)

    def _square_of_own_batches(self) -> np.ndarray:
        """Mean over all batches of |sum over its prompts of E[h'_p | prompt]|^2, [1 + P]."""
        h_P_S, m = self._replicate.both_P_S, self._size
        return m * mean_without(self._replicate.square_P) + m * (m - 1) * product_of_means(h_P_S @ h_P_S.T)


def variance_of_ratio(gram_P_P: np.ndarray, tokens_P: np.ndarray) -> np.ndarray:
    """1 / (P - 1) sum over p of |g_p - R n_p|^2  with R = sum g / sum n, from the products of the g_p, [1 + P]."""
    own_P, with_P, n = np.diag(gram_P_P), gram_P_P @ tokens_P, tokens_P
    rows_P = gram_P_P.sum(1)

    def without(total: float, of_P: np.ndarray) -> np.ndarray:
        return np.concatenate([[total], total - of_P])

    squares = without(own_P.sum(), own_P)
    mixed = without(with_P.sum(), with_P + n * rows_P - n * own_P)
    whole = without(gram_P_P.sum(), 2 * rows_P - own_P)
    tokens, tokens_squared = without(n.sum(), n), without((n**2).sum(), n**2)
    prompts = np.concatenate([[len(n)], np.full(len(n), len(n) - 1)])
    return (squares - 2 * mixed / tokens + tokens_squared * whole / tokens**2) / (prompts - 1)
