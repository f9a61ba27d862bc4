"""Runs operators of all levels from a batch to token advantages, so that one suite of laws tests them all."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from verl_credit.credit import REGISTRY
from verl_credit.credit.laws.world import World
from verl_credit.credit.operator import Operator
from verl_credit.credit.token.token_credit import token_credit
from verl_credit.credit.token.uncertainty import uncertainty
from verl_credit.credit.turn.mode import TurnMode
from verl_credit.credit.turn.modes import MODES
from verl_credit.credit.turn.turn_credit import BatchTables, credit_of
from verl_credit.credit.turn.turns import spread

GAMMA = 0.9
SEPA_LAMBDA = 0.6
BESIDE = "turn-group-v1d"  # gives turns of a row different advantages
GTPO_BETA = 1.0  # the largest at which no weight of an uncertainty can fall below 0


@dataclass(frozen=True)
class Result:
    """Float outputs per token, and counts."""

    advantage_B_T: torch.Tensor
    clip_scale_B_T: torch.Tensor
    counts: Mapping[str, int] = field(default_factory=dict)

    def outputs(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.advantage_B_T, self.clip_scale_B_T


@dataclass(frozen=True)
class Subject:
    """An operator that the laws examine."""

    name: str
    level: str
    """outcome, turn, token, or whole (canonical methods and algorithms, which replace the others)."""
    function: Any
    run: Callable[[World], Result]
    apply: Callable[[World, torch.Tensor], torch.Tensor] | None = None
    """Token level: from the turns' advantages to the tokens' advantages."""
    given: Callable[[World], Result] | None = None
    """Token level: the turns' advantages that `run` applies it to."""
    reads_turns: bool = False
    """Token level: it can stand beside a turn mode."""
    reads: frozenset[str] = frozenset()
    """The inputs that it reads among those that may be absent: "planning mask", "entropy", "gains"."""
    uncertainty: Callable[[World], torch.Tensor] | None = None
    call: Callable[[], Callable[[], Any]] | None = None
    """Makes the bare function, ready to be called on a small input, many times."""
    tables: tuple[str, ...] = ()
    """Turn level: the optional tables that it reads."""
    scope: str = "group"
    properties: frozenset[str] | None = None
    """The declared properties; None: it declares nothing, so that every finding is accepted."""
    exempt: Mapping[str, str] = field(default_factory=dict)
    operator: Operator | None = None


def registered_subject(level: str, name: str) -> Subject:
    """An operator of ours, by level (outcome, turn, token, canonical) and name."""
    operator = REGISTRY[level, name]
    apply = given = None
    if level == "outcome":
        run = partial(run_outcome, operator=name)
    elif level == "turn":
        run = partial(run_turn_mode, mode=MODES[name])
    elif level == "token":
        given = partial(run_turn_mode, mode=MODES[BESIDE])
        apply = partial(_apply_token, mode=name)
        run = partial(run_token, apply=apply, given=given)
    else:
        run = partial(_run_canonical, function=operator.function)
    return Subject(
        name,
        "whole" if level == "canonical" else level,
        operator.function,
        run,
        apply,
        given,
        reads_turns=level == "token",
        reads=frozenset(operator.reads),
        tables=tables_given(MODES[name]) if level == "turn" else (),
        scope=operator.scope,
        properties=operator.properties,
        exempt=operator.exempt,
        operator=operator,
    )


def run_turn_mode(world: World, *, mode: TurnMode, **options) -> Result:
    options = {"gamma": GAMMA, **options} if "gamma" in mode.options else options
    tables = BatchTables(
        world.outcome_B, world.gain_B_K, world.has_gain_B_K, world.group_B, world.valid_B, world.n_tool_turns_B,
        {name: getattr(world, name) for name in tables_given(mode, options.get("parity"))},
    )  # fmt: skip
    credit = credit_of(mode, tables, options)
    advantage_B_T = spread(credit.advantage_B_K1, world.turn_ids_B_T, world.mask_B_T)
    scale_B_T = spread(credit.clip_scale_B_K1, world.turn_ids_B_T, world.mask_B_T, fill=1.0)
    return Result(advantage_B_T, scale_B_T, credit.counts)


def tables_given(mode: TurnMode, parity: str | None = None) -> tuple[str, ...]:
    """The optional tables that it reads: mt_grpo reads ``result_turn_B`` only with parity="released"."""
    return tuple(name for name in mode.tables if name != "result_turn_B" or parity == "released")


def run_outcome(world: World, *, operator) -> Result:
    return run_turn_mode(world, mode=MODES["none"], outcome_operator=operator)


def run_token(world: World, *, apply, given) -> Result:
    turns = given(world)
    return Result(apply(world, turns.advantage_B_T), turns.clip_scale_B_T, turns.counts)


def _apply_token(world: World, turn_advantage_B_T: torch.Tensor, *, mode: str) -> torch.Tensor:
    mask_B_T = world.counted_B_T
    return token_credit(
        turn_advantage_B_T,
        mask_B_T,
        transform_mode=mode,
        uncertainty_B_T=uncertainty("surprisal", world.log_prob_B_T, mask_B_T),
        planning_B_T=world.planning_B_T,
        group_B=world.group_B,
        sepa_lambda=SEPA_LAMBDA,
        gtpo_beta=GTPO_BETA,
    ).advantage_B_T


def _run_canonical(world: World, *, function) -> Result:
    advantage = function(
        world.outcome_B, world.entropy_B_T, world.mask_B_T, world.group_B, row_valid_B=world.valid_B
    )
    if advantage.dim() == 1:
        advantage = torch.where(world.mask_B_T, advantage[:, None], 0.0)
    return Result(advantage, torch.ones_like(advantage))
