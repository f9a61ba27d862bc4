"""Batches of prompts, and the mean cosine of a batch's gradient with a direction.

A batch of 16 prompts is one of many that the P prompts could have made, and the mean over all of them has less noise than
that over one cut into P / 16. So batches are drawn: the prompts are shuffled and cut, again and again.
"""

from __future__ import annotations

import numpy as np

DRAWS_PER_PROMPT = 20
"""Batches drawn, by the number of prompts: what the draw adds to the variance of a mean is then about a twentieth."""


def draw_batches(prompts: int, size: int, seed: int = 0) -> np.ndarray:
    """[R, P] of 0 and 1, ``size`` ones a row; batches cut from one shuffle share no prompt."""
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

    Column 0 has every batch, the others those without that prompt; NaN elsewhere.
    """
    along_R = ((member_R_P @ cross_P_P) * member_R_P).sum(1) / length_R
    without_R_P = np.where(member_R_P > 0, np.nan, along_R[:, None])
    return np.concatenate([along_R[:, None], without_R_P], axis=1)


def along_others(cross_P_P: np.ndarray, length_R: np.ndarray, member_R_P: np.ndarray) -> np.ndarray:
    """g_b . h / |g_b|, the direction h being the mean over the prompts outside of the batch, [R, 1 + P]."""
    size, prompts = int(member_R_P[0].sum()), len(cross_P_P)
    with_R_P = member_R_P @ cross_P_P
    others_R = (with_R_P * (1 - member_R_P)).sum(1)
    along_R = others_R / (prompts - size) / length_R
    fewer_R_P = (others_R[:, None] - with_R_P) / (prompts - size - 1) / length_R[:, None]
    return np.concatenate([along_R[:, None], np.where(member_R_P > 0, np.nan, fewer_R_P)], axis=1)


def mean_over_batches(along_R_1P: np.ndarray) -> np.ndarray:
    """[1 + P]; NaN where no batch is left."""
    known = np.isfinite(along_R_1P)
    with np.errstate(invalid="ignore"):
        return np.where(known, along_R_1P, 0.0).sum(0) / known.sum(0)
