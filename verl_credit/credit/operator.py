"""What is known of an operator: what it reads, its equation, its bias, its source, and the laws it is exempt from."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

CENTRED, NORMALISED = frozenset({"centred"}), frozenset({"normalised"})
WEIGHS, CONSERVES = frozenset({"weighs"}), frozenset({"conserves"})


@dataclass(frozen=True)
class Operator:
    """One entry of the registry."""

    name: str
    level: str
    function: Callable
    reads: tuple[str, ...]
    """Inputs by name: rewards, groups, gains (turn rewards), uncertainty, planning mask, sepa lambda, entropy, and a turn
    mode's optional tables (`turn.mode.OPTIONAL_TABLES`)."""
    equation: str
    reduces_to: str
    bias: str
    departures: str
    source: str
    scope: str = "group"
    """Which other rows can matter: row (none), group (those of one prompt) or batch."""
    properties: frozenset[str] = frozenset()
    """Of `laws.properties`: centred, normalised, weighs, conserves. A property that is not named does not hold."""
    exempt: Mapping[str, str] = field(default_factory=dict)
    """Law -> why it does not hold here."""


def over_population_std(n: int) -> float:
    """`none` divides by the std with n - 1, the turn modes by the one with n."""
    return math.sqrt(n / (n - 1)) if n > 1 else 1.0


def leave_one_out_factor(n: int) -> float:
    """r - mean of the others = n / (n - 1) (r - mean of all)."""
    return n / (n - 1) if n > 1 else 1.0


@dataclass(frozen=True)
class WithoutGains:
    """What a turn mode is when no turn has a gain: `none`, with or without std, times a factor of the group's size."""

    factor: Callable[[int], float] = over_population_std
    norm_by_std: bool = True
