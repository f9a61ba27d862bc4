"""The operators that are compared: a name, a function from a batch to token advantages, and what it optimises."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from verl_credit.credit.laws import own_subject
from verl_credit.credit.laws.subjects import Result, run_turn_mode
from verl_credit.credit.laws.world import World
from verl_credit.credit.outcome import OUTCOME_OPERATORS
from verl_credit.credit.turn.mode import TurnMode
from verl_credit.credit.turn.modes import MODES
from verl_credit.study.fidelity.exact.objectives import Objective


@dataclass(frozen=True)
class Credit:
    """One row of the comparison."""

    name: str
    run: Callable[[World], Result]
    scope: str = "group"
    """Of its operator: row, group or batch. With batch, every group is a batch of its own here."""
    reads_policy: bool = False
    """It reads values, log-probs or entropies: its advantages change with the policy."""
    own: Objective | None = None
    """The objective whose gradient it says it follows; None: it names none, or E[r] itself."""
    own_name: str = ""


def turn_credit_of(
    mode: str | TurnMode,
    label: str | None = None,
    *,
    gains: bool | None = None,
    own=None,
    own_name="",
    **options,
):
    """A turn mode with these options. ``gains``: turns earn information gain (None: as the mode's default).

    Its constants are the mode's own; gamma is 1 unless given.
    """
    declared = MODES[mode] if isinstance(mode, str) else mode
    options = {"gamma": 1.0, **options} if "gamma" in declared.options else options
    if declared.name == "progress":
        options.setdefault("gamma", declared.options["gamma"])
    gains = declared.default_signal != "none" if gains is None else gains
    run = partial(run_turn_mode, mode=declared, **options)
    return Credit(
        label or declared.name,
        run if gains else lambda world: run(world.without_gains()),
        scope=declared.scope,
        reads_policy="values" in declared.reads,
        own=own,
        own_name=own_name,
    )


def outcome_credit_of(operator: str, label: str | None = None, *, own=None, own_name="", **options) -> Credit:
    """A registered outcome operator, the same advantage for every turn (turn mode ``none``)."""
    run = partial(run_turn_mode, mode=MODES["none"], outcome_operator=operator, **options)
    scope = OUTCOME_OPERATORS[operator].scope
    return Credit(label or operator, run, scope=scope, own=own, own_name=own_name)


def own_credit(found: Any, name: str, *, kind: str | None = None, params: dict | None = None) -> Credit:
    """A user's operator of any kind, as `verl-credit check` runs it."""
    subject = own_subject(found, name, kind=kind, params=params)
    reads_policy = subject.level in ("token", "whole") or "value_B_K1" in subject.tables
    return Credit(name, subject.run, scope=subject.scope, reads_policy=reads_policy)


def turn_penalty(penalty: float, *, own: Objective) -> Credit:
    """Control: RLOO on r - penalty x turns, the answer's included. It knows nothing of what a turn did."""
    operator = partial(run_turn_mode, mode=MODES["none"], outcome_operator="rloo")

    def run(world: World) -> Result:
        turns_B = world.n_tool_turns_B.double() + 1  # integers times a float would be float32
        return operator(world.but(outcome_B=world.outcome_B - penalty * turns_B))

    return Credit(f"turn penalty {penalty:g}", run, own=own, own_name=f"r - {penalty:g} turns")


def constant_credit() -> Credit:
    """Control: advantage 1 everywhere. Its expected gradient is 0."""
    return Credit(
        "constant", lambda world: Result(world.mask_B_T.double(), world.mask_B_T.double()), scope="row"
    )


def policy_free(world: World) -> World:
    """The world without what depends on the policy: NaN, so that an operator that reads it all the same is noticed."""
    fields = ("value_B_K1", "log_prob_B_T", "entropy_B_T")
    return world.but(**{name: torch.full_like(getattr(world, name), torch.nan) for name in fields})
