"""How well a mode's gradient agrees with grad E[r], by statistics in which no noise is multiplied with itself.

g_p is a prompt's credited gradient, h_p the same with the true advantages (so that E[h_p] is grad E[r], but for a factor),
h'_p that of independent rollouts of the same prompt. A batch b has the prompts that `draw_batches` gives it.

    bias             E[g] . E[h] / sqrt(|E[g]|^2 |E[h]|^2)                 each by a U-statistic over different prompts
    signal to noise  |E[g]|^2 / trace Cov[g_b]                             0.5: the noise is twice as long, squared
    own cos          mean over b of g_b . h'_b / |g_b|, / sqrt(mean over b of |E[h'_b | its prompts]|^2)

The noise of h' is not in own cos: in the numerator it is independent of g_b, and the squared lengths are estimated without
it (`product_of_means`, `square_of_means`). The noise of g_b stays: a training step has it. |E[h'_b]| is one number for all
batches, because it is not known well of one batch.

`token-mean` divides a batch's gradient by its tokens. That changes no cosine of a batch. Signal to noise has it to first
order. Bias leaves it out: it adds a term of the order Cov(g_p, tokens of p) / batch_prompts to E[g_b].

Prompts are shuffled and cut into batches again and again, which has less noise than one cut. Intervals are the jackknife's
over prompts: everything is taken again without each prompt, from the batches that lack it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from verl_credit.study.stats import Measure, interval, mean_without, product_of_means, root

DRAWS_PER_PROMPT = 20
"""Batches drawn, by the number of prompts: what the draw adds to the variance of a mean is then about a twentieth."""


def draw_batches(prompts: int, size: int, seed: int = 0) -> np.ndarray:
    """[R, P] of 0 and 1, with ``size`` 1s a row; batches cut from one shuffle share no prompt."""
    random = np.random.default_rng(seed)
    per_shuffle = prompts // size
    shuffles = -(-DRAWS_PER_PROMPT * prompts // per_shuffle)
    order = random.permuted(np.tile(np.arange(prompts), (shuffles, 1)), axis=1)[:, : per_shuffle * size]
    member_R_P = np.zeros((shuffles * per_shuffle, prompts))
    np.put_along_axis(member_R_P, order.reshape(-1, size), 1.0, axis=1)
    return member_R_P


def length_of_batches(gram_P_P: np.ndarray, member_R_P: np.ndarray) -> np.ndarray:
    """|sum of a batch's gradients|, [R]; NaN for a batch without any gradient, which has no direction."""
    square_R = ((member_R_P @ gram_P_P) * member_R_P).sum(1)
    return np.sqrt(np.where(square_R > 1e-24, square_R, np.nan))


def along_own(cross_P_P: np.ndarray, length_R: np.ndarray, member_R_P: np.ndarray) -> np.ndarray:
    """g_b . h_b / |g_b|, the direction h being the sum over the batch's prompts, [R, 1 + P].

    Column 0 has every batch, the other columns the batches without that prompt; NaN elsewhere.
    """
    along_R = ((member_R_P @ cross_P_P) * member_R_P).sum(1) / length_R
    without_R_P = np.where(member_R_P > 0, np.nan, along_R[:, None])
    return np.concatenate([along_R[:, None], without_R_P], axis=1)


def mean_over_batches(along_R_1P: np.ndarray) -> np.ndarray:
    """[1 + P]; NaN where no batch remains."""
    known = np.isfinite(along_R_1P)
    with np.errstate(invalid="ignore"):
        return np.where(known, along_R_1P, 0.0).sum(0) / known.sum(0)


@dataclass(frozen=True)
class PromptSums:
    """g_p = sum over the turns of prompt p of advantage x G, float64 [P, S].

    True advantages are noisy by their values, and turns of a prompt share values. Their sums therefore stand here twice, by
    each half of the continuations: the noise of one half is independent of the other's. Credit of a mode is the same twice.
    """

    first_P_S: np.ndarray
    second_P_S: np.ndarray
    held_out: bool = False
    """The credit is made from the values' first half: on a prompt, only the second half of another sum is independent."""
    square_P: np.ndarray | None = None
    """|E[g_p | prompt]|^2, unbiased; see `square_of_means`."""

    @property
    def both_P_S(self) -> np.ndarray:
        return self.first_P_S if self.second_P_S is self.first_P_S else (self.first_P_S + self.second_P_S) / 2


@dataclass(frozen=True)
class GradientAgreement:
    """The agreement of one mode; ``n`` is the number of prompts.

    Undefined where credit is 0 everywhere and where the estimate of a squared length is not positive. Own cosine
    needs two prompts more than a batch has.
    """

    bias: Measure
    signal_to_noise: Measure
    """The value is None when |E[g]|^2 is not estimated above 0; the interval is still given."""
    own: Measure
    own_difference: Measure
    """The difference to the mode `none`, paired by batch."""


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
        batch_prompts: int,
        seed: int = 0,
    ):
        self._true, self._replicate, self._tokens_P = true, replicate, tokens_P
        self._size, self._prompts = batch_prompts, len(tokens_P)
        if self._prompts < 3:
            raise ValueError(f"{self._prompts} prompts; expected at least 3, of which the jackknife leaves 2")
        h_P_S = true.both_P_S
        self._true_square_1P = product_of_means(h_P_S @ h_P_S.T)
        if self._prompts >= batch_prompts + 2:
            self._member_R_P = draw_batches(self._prompts, batch_prompts, seed)
            # the mean over all batches of |sum over its prompts of E[h'_p | prompt]|^2
            m, products_1P = batch_prompts, product_of_means(replicate.both_P_S @ replicate.both_P_S.T)
            self._own_square_1P = m * mean_without(replicate.square_P) + m * (m - 1) * products_1P
            self._none = self._along(none)

    def of(self, credited: PromptSums) -> GradientAgreement:
        g_P_S, h_P_S = credited.both_P_S, self._true.both_P_S
        gram_P_P = g_P_S @ g_P_S.T
        square_1P = product_of_means(gram_P_P)
        bias_1P = product_of_means(g_P_S @ h_P_S.T) / root(square_1P) / root(self._true_square_1P)
        signal_to_noise = self._signal_to_noise(gram_P_P, square_1P)
        return GradientAgreement(interval(bias_1P), signal_to_noise, *self._own(credited))

    def _signal_to_noise(self, gram_P_P: np.ndarray, square_1P: np.ndarray) -> Measure:
        """B |E[g_p]|^2 / trace Cov[g_p - R n_p]  with B prompts a batch, n_p tokens, R = sum g / sum n."""
        if not np.diag(gram_P_P).any():
            return Measure(None, n=self._prompts)
        with np.errstate(invalid="ignore", divide="ignore"):  # without the only prompt with credit: 0 / 0
            measured = interval(self._size * square_1P / variance_of_ratio(gram_P_P, self._tokens_P))
        positive = measured.value is not None and measured.value > 0
        return measured if positive else Measure(None, measured.low, measured.high, measured.n)

    def _own(self, credited: PromptSums) -> list[Measure]:
        """Own cosine, and its difference."""
        if self._prompts < self._size + 2:
            return [Measure(None, n=self._prompts)] * 2
        along, norm_1P = self._along(credited), root(self._own_square_1P)
        return [interval(mean_over_batches(one) / norm_1P) for one in (along, along - self._none)]

    def _along(self, credited: PromptSums) -> np.ndarray:
        """Along grad E[r] of the batch's own prompts, [R, 1 + P]."""
        g_P_S, h = credited.both_P_S, self._replicate
        length_R = length_of_batches(g_P_S @ g_P_S.T, self._member_R_P)
        cross_P_P = credited.first_P_S @ h.second_P_S.T
        if not credited.held_out:
            cross_P_P = (cross_P_P + credited.second_P_S @ h.first_P_S.T) / 2
        return along_own(cross_P_P, length_R, self._member_R_P)


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
