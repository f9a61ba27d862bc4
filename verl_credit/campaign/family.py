"""How many pairs a family of comparisons needs at the least; known before the first run."""

from __future__ import annotations

import math

LEVEL = 0.05


def fewest_pairs(family: int, level: float = LEVEL) -> int:
    """Fewer pairs cannot reach ``level`` after Holm: the smallest n with family 2 / 2^n <= level.

    The sign-flip test of n pairs has 2^n equally likely outcomes; its two most extreme give p = 2 / 2^n.
    """
    return math.ceil(math.log2(2 * family / level))
