"""A count sketch: a long vector in few numbers that keeps inner products on average.

    S(x)_b = sum over the i with bucket b of sign_i x_i        E[S(x) . S(y)] = x . y        sd <= sqrt(2 / buckets) |x| |y|

Bucket and sign of each place are drawn at random, once; the expectation is over that draw. S is linear. With 16,384 buckets
a cosine is off by about .008. Source: Charikar, Chen and Farach-Colton 2002; Weinberger et al. 2009.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

BUCKETS = 16_384


class CountSketch:
    """Of vectors of ``length`` entries; the same ``seed``, the same sketch."""

    def __init__(self, length: int, *, buckets: int = BUCKETS, seed: int = 0):
        random = torch.Generator().manual_seed(seed)
        self.buckets = buckets
        self._bucket_L = torch.randint(buckets, (length,), generator=random)
        self._sign_L = torch.randint(2, (length,), generator=random).float() * 2 - 1

    def __call__(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """[buckets] of the vector that the parts make one after the other, in their dtype."""
        vector_L = torch.cat([part.flatten() for part in parts])
        if len(vector_L) != len(self._bucket_L):
            raise ValueError(f"{len(vector_L)} entries; expected {len(self._bucket_L)}")
        return vector_L.new_zeros(self.buckets).scatter_add_(0, self._bucket_L, vector_L * self._sign_L)
