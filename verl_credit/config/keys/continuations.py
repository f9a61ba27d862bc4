"""``algorithm.turn_continuations.*``: which states of a step are tried again, and how often."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from verl_credit.config.keys import reads
from verl_credit.config.keys.section import Expected, Section, When

AtLeast1 = Annotated[int, Field(ge=1)]


class Continuations(Section):
    states: Annotated[AtLeast1, When(reads.continued)] = 16
    """States of a step that are valued by continuations; the first state of a prompt is none of them."""
    count: Annotated[AtLeast1, When(reads.continued)] = 4
    """Continuations from each of these states; V is the mean of their outcomes."""
    every: Annotated[AtLeast1, When(reads.continued)] = 1
    """Steps 1, 1 + n, 1 + 2n, ... make continuations; the others have the values of `otherwise` alone."""
    choose: Annotated[Literal["random", "uncertainty"], When(reads.continued)] = "random"
    """uncertainty: the states after the turns whose tokens had the lowest mean log-prob; random: any states."""
    otherwise: Annotated[
        str,
        Expected(
            f"{', '.join((reads.LEAVE_ONE_OUT, *reads.OBSERVED))}, {reads.COLUMN}NAME, or a dotted path to your own"
        ),
        When(reads.continued),
    ] = "leave_one_out"
    """V of the other states. leave_one_out: the mean outcome of the prompt's other rollouts, and after a state that was
    valued the value of that state; or a name of algorithm.turn_values, whose regression is made."""
    repeatable_tools: Annotated[bool, When(reads.continued)] = False
    """true: your tools may be called again with the calls of a rollout, without an effect on other rollouts."""
