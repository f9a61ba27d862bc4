"""Counterexamples: made smaller while they still break the law, and written as lists that one can paste."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from verl_credit.credit.laws.broken import Broken
from verl_credit.credit.laws.subjects import Subject
from verl_credit.credit.laws.world import World
from verl_credit.credit.plugins.lists import turn_lists

TRIES = 200
BY_TOKEN = ("turn_ids_B_T", "mask_B_T", "log_prob_B_T", "entropy_B_T", "planning_B_T")


@dataclass(frozen=True)
class Run:
    """Describes one call of the operator; ``given`` holds the turns' advantages when the law brought its own."""

    world: World
    given: torch.Tensor | None
    result: torch.Tensor | Exception


@dataclass(frozen=True)
class Example:
    """A world that breaks a law, and the calls that show it."""

    law: Callable
    world: World
    message: str
    runs: list[Run] = field(default_factory=list)

    def __str__(self) -> str:
        return self.message


class Log:
    """`subject` with its calls written down in `runs`."""

    def __init__(self, subject: Subject) -> None:
        self.runs: list[Run] = []
        apply = None if subject.apply is None else self._logged(subject.apply)
        self.subject = replace(subject, run=self._logged(subject.run), apply=apply)

    def _logged(self, function: Callable) -> Callable:
        def call(world: World, *given: torch.Tensor) -> Any:
            try:
                result = function(world, *given)
            except Exception as error:
                self.runs.append(Run(world, *(given or (None,)), error))
                raise
            self.runs.append(Run(world, *(given or (None,)), getattr(result, "advantage_B_T", result)))
            return result

        return call

    def raised(self, error: Exception) -> bool:
        return bool(self.runs) and self.runs[-1].result is error


def smallest(example: Example, subject: Subject) -> Example:
    """The smallest world that a greedy search finds in `TRIES`. A call's error counts, a law's own does not."""
    tries, smaller = 0, True
    while smaller:
        smaller = False
        for world in _smaller(example.world):
            if (tries := tries + 1) > TRIES:
                return example
            log = Log(subject)
            try:
                example.law(log.subject, world)
            except Broken as broken:
                example, smaller = Example(example.law, world, str(broken), log.runs[-broken.runs :]), True
            except Exception as error:
                if log.raised(error):
                    message = f"{type(error).__name__}: {error}"
                    example, smaller = Example(example.law, world, message, log.runs[-1:]), True
            if smaller:
                break
    return example


def _smaller(world: World) -> Iterator[World]:
    """Fewer prompts, rows, turns and tokens, in this order, then plainer numbers."""
    rows, width = world.mask_B_T.shape
    groups = world.group_B.unique()
    if len(groups) > 1:
        for group in groups:
            yield world.rows((world.group_B == group).nonzero().flatten())
    if rows > 3:
        yield world.rows(torch.arange(rows // 2))
    for row in range(rows if rows > 1 else 0):
        yield world.rows((torch.arange(rows) != row).nonzero().flatten())
    if world.has_gain_B_K.any():
        first_B_T = torch.where(world.turn_ids_B_T == 0, 0, -1)
        yield _tidy(world.but(turn_ids_B_T=first_B_T))
        yield world.without_gains()
    kept_T = (world.turn_ids_B_T >= 0).any(dim=0)
    if not kept_T.all():
        yield _tidy(world, kept_T)
    for last in (width // 2, width - 1):
        if 0 < last < width:
            yield _tidy(world, torch.arange(width) < last)
    for place in range(width if width > 1 else 0):
        yield _tidy(world, torch.arange(width) != place)
    for name, plain in (
        ("group_B", torch.zeros_like(world.group_B) if len(groups) == 1 else world.group_B),
        ("outcome_B", world.outcome_B.round()),
        ("planning_B_T", torch.zeros_like(world.planning_B_T)),
        ("log_prob_B_T", torch.where(world.mask_B_T, world.log_prob_B_T.round(decimals=1), -1.0)),
        ("entropy_B_T", torch.where(world.mask_B_T, world.entropy_B_T.round(decimals=1), 1.0)),
        ("gain_B_K", torch.where(world.has_gain_B_K, world.gain_B_K.round(decimals=1), 0.0)),
    ):
        if not torch.equal(plain, getattr(world, name)):
            yield world.but(**{name: plain})


def _tidy(world: World, kept_T: torch.Tensor | None = None) -> World:
    """Some columns only; turns are numbered anew, and those that are gone have no gain."""
    if kept_T is not None:
        world = world.but(**{name: getattr(world, name)[:, kept_T] for name in BY_TOKEN})
    ids_B_T = world.turn_ids_B_T
    gains_B_K, has_B_K = world.gain_B_K.clone(), torch.zeros_like(world.has_gain_B_K)
    new_B_T = torch.full_like(ids_B_T, -1)
    for row in range(len(ids_B_T)):
        old = [k for k in ids_B_T[row].unique().tolist() if k >= 0]
        for number, k in enumerate(old):
            new_B_T[row, ids_B_T[row] == k] = number
            if number < len(old) - 1:
                gains_B_K[row, number] = world.gain_B_K[row, k]
                has_B_K[row, number] = world.has_gain_B_K[row, k]
    gains_B_K = torch.where(has_B_K, gains_B_K, 0.0)
    return world.but(turn_ids_B_T=new_B_T, mask_B_T=new_B_T >= 0, gain_B_K=gains_B_K, has_gain_B_K=has_B_K)


def lines(example: Example, subject: Subject) -> Iterator[str]:
    """Each call: what went in, and what came out, one list per row."""
    for run in example.runs:
        world = run.world
        inputs = {}
        if subject.level != "token":
            inputs["rewards"] = world.outcome_B.tolist()
        if len(world.group_B.unique()) > 1:
            inputs["groups"] = world.group_B.tolist()
        if not world.valid_B.all():
            inputs["valid"] = world.valid_B.tolist()
        if subject.level == "turn":
            inputs["turn_rewards"] = _turn_rewards(world)
        for name in subject.tables:
            table = getattr(world, name)
            turn_B_K1 = torch.arange(table.shape[-1]) <= world.n_tool_turns_B[:, None]
            inputs[name] = _rows(table, turn_B_K1) if name.endswith("_K1") else table.tolist()
        if subject.level == "token":
            given_B_T = subject.given(world).advantage_B_T if run.given is None else run.given
            inputs["advantages"] = _rows(given_B_T, world.mask_B_T)
        if subject.level == "whole" and "gains" in subject.reads:
            inputs["turn_ids"] = _rows(world.turn_ids_B_T, world.mask_B_T)
            inputs["turn_rewards"] = _turn_rewards(world)
        if subject.level in ("token", "whole"):
            inputs["logprobs"] = _rows(world.log_prob_B_T, world.mask_B_T)
            if world.planning_B_T is not None and "planning mask" in subject.reads:
                inputs["planning"] = _rows(world.planning_B_T.int(), world.mask_B_T)
            if world.entropy_B_T is not None and (subject.level == "whole" or subject.uncertainty):
                inputs["entropies"] = _rows(world.entropy_B_T, world.mask_B_T)
        yield ", ".join(f"{name} = {value}" for name, value in inputs.items())
        if isinstance(run.result, Exception):
            yield f"  -> {type(run.result).__name__}: {run.result}"
        else:
            out = _rows(run.result, world.mask_B_T)
            if subject.level == "outcome":
                out = [row[0] if row else None for row in out]
            yield f"  -> {out}"


def _turn_rewards(world: World) -> list[list]:
    """The rewards of each row's tool turns; a turn without one has None."""
    rows = list(range(len(world.outcome_B)))
    return turn_lists(world.gain_B_K, world.has_gain_B_K, world.turn_ids_B_T, rows)


def _rows(values_B_T: torch.Tensor, mask_B_T: torch.Tensor) -> list[list]:
    values_B_T = values_B_T.detach()
    return [values_B_T[row][mask_B_T[row]].tolist() for row in range(len(values_B_T))]
