"""An operator declares what it reads, its equation, bias and source, its exemptions from laws, its options' ranges."""

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import dropwhile, takewhile
from typing import Annotated, Any

CENTRED, NORMALISED = frozenset({"centred"}), frozenset({"normalised"})
WEIGHS, CONSERVES = frozenset({"weighs"}), frozenset({"conserves"})
INDENT = " " * 4
ONE, RESETS, SUB_AGENTS = "one", "resets", "sub-agents"
OUTPUTS = {
    ONE: "refused",
    RESETS: "those of context resets, where one output goes on after the other",
    SUB_AGENTS: "those of context resets and of sub-agents",
}


def equation_of(function: Callable) -> str:
    """The equation in the function's docstring: its first indented block, in one line."""
    lines = dropwhile(lambda line: not line.startswith(INDENT), (inspect.getdoc(function) or "").splitlines())
    return "; ".join(
        " ".join(line.split()) for line in takewhile(lambda line: line.startswith(INDENT), lines)
    )


@dataclass(frozen=True, kw_only=True)
class Operator:
    """An operator's declaration, in its own file. The registry, the laws, `explain` and docs/modes.md read it."""

    name: str
    level: str
    function: Any
    """A function; a token transform's parts (`TokenTransform`)."""
    reads: tuple[str, ...] = ("rewards", "groups")
    """Inputs by name: rewards, groups, gains (turn rewards), uncertainty, planning mask, sepa lambda, entropy, and a turn
    mode's optional tables (`turn.mode.OPTIONAL_TABLES`)."""
    equation: str = ""
    """The default is read from the function's docstring (`equation_of`)."""
    reduces_to: str
    bias: str
    departures: str = "none"
    source: str
    objective: str = ""
    """Its expected gradient increases this where outcomes are 0 or 1 (`fidelity.exact`); p is the chance of a 1."""
    scope: str = "group"
    """The rows that can matter beside the own: row (none), group (the rows of the prompt) or batch."""
    properties: frozenset[str] = frozenset()
    """Its properties (`laws.effects`): centred, normalised, weighs, conserves. A property that is not here does not hold."""
    exempt: Mapping[str, str] = field(default_factory=dict)
    """Law -> why it does not hold here."""
    outputs: str = SUB_AGENTS
    """The rollouts of several outputs that it has a meaning for (`OUTPUTS`), joined to one row each."""

    def __post_init__(self) -> None:
        if not self.equation:
            object.__setattr__(self, "equation", equation_of(self.function))


def over_population_std(n: int) -> float:
    """`none` divides by the std with n - 1, the turn modes by the one with n."""
    return math.sqrt(n / max(n - 1, 1))


def leave_one_out_factor(n: int) -> float:
    """r - mean of the others = n / (n - 1) (r - mean of all)."""
    return n / max(n - 1, 1)


@dataclass(frozen=True)
class WithoutGains:
    """A turn mode is `none`, with or without std, times a factor of the group's size when no turn has a gain."""

    factor: Callable[[int], float] = over_population_std
    norm_by_std: bool = True


@dataclass(frozen=True)
class Range:
    """Numbers from ``low`` to ``high``, whole ones where ``low`` is one."""

    low: float
    high: float = math.inf
    low_allowed: bool = True
    high_allowed: bool = False

    def check(self, name: str, value: Any) -> None:
        """Raise ValueError for a value outside the range."""
        whole = isinstance(self.low, int)
        number = isinstance(value, int if whole else int | float) and not isinstance(value, bool)
        if not number or not (
            self.low < value < self.high
            or (self.low_allowed and value == self.low)
            or (self.high_allowed and value == self.high)
        ):
            bounds = f"{'at least' if self.low_allowed else 'above'} {self.low:g}"
            if self.high < math.inf:
                bounds += f" and {'at most' if self.high_allowed else 'below'} {self.high:g}"
            raise ValueError(f"{name}={value!r}: expected a {'whole ' if whole else ''}number {bounds}")


AtLeastZero = Annotated[float, Range(0.0)]
Positive = Annotated[float, Range(0.0, low_allowed=False)]
BelowOne = Annotated[float, Range(0.0, 1.0)]
Share = Annotated[float, Range(0.0, 1.0, high_allowed=True)]
Count = Annotated[int, Range(0)]
Number = Annotated[int, Range(1)]


def refuse_unread(beside: str, why: str, **given: tuple[Any, Any]) -> None:
    """Raise ValueError for an option that another one leaves unread. ``given``: its value and its default, which passes."""
    for name, (value, default) in given.items():
        if value != default:
            raise ValueError(f"{name}={value!r} with {beside}: {why}; leave it at {default!r}")
