"""How many pairs a family of comparisons needs at the least; known before the first run."""

from __future__ import annotations

import math

LEVEL = 0.05


def fewest_pairs(family: int, level: float = LEVEL) -> int:
    """Fewer pairs cannot reach ``level`` after Holm: the smallest n with family 2 / 2^n <= level.

    The sign-flip test of n pairs has 2^n equally likely outcomes; its two most extreme give p = 2 / 2^n.
    """
    return math.ceil(math.log2(2 * family / level))


def cannot_resolve(pairs: int, family: int) -> str:
    """A sentence where so few pairs cannot resolve anything; else empty."""
    least = fewest_pairs(family)
    if pairs >= least:
        return ""
    few, many = (f"{n} {what}{'s' * (n != 1)}" for n, what in ((pairs, "pair"), (family, "comparison")))
    return f"{few} (seed, world) cannot resolve {many} at {100 * LEVEL:g} %: at least {least} are needed"
