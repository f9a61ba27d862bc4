"""The two laws that come first: where one of them is broken, the others say nothing more."""

from __future__ import annotations

import time
from collections.abc import Iterable
from contextlib import suppress

import torch

from verl_credit.credit.laws.broken import Broken, same
from verl_credit.credit.laws.laws import on, run, usual_worlds
from verl_credit.credit.laws.subjects import Subject
from verl_credit.credit.laws.world import World, make_world

CALLS, SECONDS = 12_000, 2.0

Outputs = tuple[torch.Tensor, torch.Tensor]


def plain() -> World:
    world = make_world(0, group_sizes=(2,), turns=1)
    return world.but(outcome_B=torch.tensor([1.0, 0.0], dtype=torch.float64))


@on(lambda seed: [plain()])
def runs(subject: Subject, world: World) -> None:
    """It takes two rows of one prompt, one of them solved."""
    subject.run(world)


def _with_plain(seed: int) -> Iterable[World]:
    if seed == 0:
        yield plain()
    yield from usual_worlds(seed)


@on(_with_plain)
def pure(subject: Subject, world: World) -> None:
    """The same input gives the same bits, whatever was called before and however often; inputs stay as they are."""
    before = world.map(torch.clone)
    first = _outputs(subject, world)
    _outputs(subject, make_world(7, group_sizes=(2, 3)))
    _unchanged(subject, world, first)
    if subject.call is not None and len(world.outcome_B) == 2:
        repeat(subject)
        _unchanged(subject, world, first)
    for name, tensor in vars(before).items():
        now = getattr(world, name)
        if not torch.equal(torch.nan_to_num(now.double()), torch.nan_to_num(tensor.double())):
            raise Broken(f"the operator changed its input {name}")


def _unchanged(subject: Subject, world: World, first: Outputs | str) -> None:
    again = _outputs(subject, world)
    if isinstance(first, str) or isinstance(again, str):
        if first != again:
            raise Broken(f"the same input, once more: {again}, and not {first}")
    else:
        same(again, first, tolerance=0.0, what="the same input, once more", runs=1)


def _outputs(subject: Subject, world: World) -> Outputs | str:
    """What it raises always is for the other laws to tell."""
    try:
        return run(subject, world)
    except Exception as error:
        return type(error).__name__


def repeat(subject: Subject) -> None:
    """Calls the bare function `CALLS` times, or for `SECONDS` if it is slow, or until it raises."""
    call, until = subject.call(), time.monotonic() + SECONDS
    with suppress(Exception):
        for number in range(CALLS):
            call()
            if number % 100 == 0 and time.monotonic() > until:
                return
