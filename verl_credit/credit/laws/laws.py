"""The laws of shape, place and precision. A law takes a subject and a world, and raises `Broken`."""

import pickle
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

import torch

from verl_credit.credit.laws.drawn_world import NAN, World, beside, make_world
from verl_credit.credit.laws.subjects import Subject

HALVES = (torch.float16, torch.bfloat16, torch.float32)
CALLS, SECONDS = 12_000, 2.0

# Tolerances are relative to the scale: the largest of the numbers compared.
CLOSE = {torch.float32: 1e-5, torch.float64: 1e-12}  # keys: the returned dtype; only a sum's order may matter
ABOUT = 1e-4  # allows for variance floors and epsilons

Law = Callable[[Subject, World], None]
Outputs = tuple[torch.Tensor, torch.Tensor]


class Broken(AssertionError):
    """A law does not hold; the message says where. ``runs``: how many of the operator's last calls show it."""

    def __init__(self, message: str, runs: int = 1) -> None:
        super().__init__(message)
        self.runs = runs


def finite(outputs, what: str = "a value that is not finite went in, and") -> None:
    for out in outputs:
        if not out.isfinite().all():
            raise Broken(f"{what}: row {int((~out.isfinite()).nonzero()[0, 0])} of the result is not finite")


def scale_of(values: torch.Tensor) -> float:
    """The largest size of a value; 1 where all are 0."""
    sizes = values.abs().nan_to_num()
    return (float(sizes.max()) if sizes.numel() else 0.0) or 1.0


def same(ours, expected, *, tolerance: float | None = None, what: str = "", runs: int = 2) -> None:
    """Raises unless ``|ours - expected| <= tolerance * max |expected|``; the default is `CLOSE` of the dtype."""
    for name, a, b in zip(("advantage", "clip scale"), ours, expected, strict=False):
        limit = CLOSE[a.dtype] if tolerance is None else tolerance
        far = (a - b).abs() > limit * scale_of(b)
        far |= a.isnan() != b.isnan()
        if far.any():
            row, place = far.nonzero()[0].tolist()
            raise Broken(
                f"{what + ': ' if what else ''}{name} of row {row}, token {place}: "
                f"{float(a[row, place]):.9g}, expected {float(b[row, place]):.9g}",
                runs,
            )


def usual_worlds(seed: int) -> Iterable[World]:
    yield make_world(seed)
    if seed == 0:
        yield make_world(seed, group_sizes=(16, 2))


def on(worlds: Callable[[int], Iterable[World]]) -> Callable[[Law], Law]:
    """The worlds that a law is tested in, by seed, in place of the usual ones."""

    def mark(law: Law) -> Law:
        vars(law)["worlds"] = worlds
        return law

    return mark


def order(subject: Subject, world: World) -> None:
    """Permuting rows permutes the result."""
    shuffled = torch.randperm(len(world.outcome_B), generator=torch.Generator().manual_seed(1))
    same(run(subject, world.rows(shuffled)), [out[shuffled] for out in run(subject, world)])


def observations(subject: Subject, world: World) -> None:
    """Observation tokens get exactly 0, and more of them change nothing on the policy's tokens."""
    rows, width = world.mask_B_T.shape
    random = torch.Generator().manual_seed(width)
    places_B_T = torch.rand(rows, width + 6, generator=random).argsort(dim=1)[:, :width].sort(dim=1).values
    spaced = world.spaced(places_B_T, width + 6)
    result = subject.run(spaced)
    if (result.advantage_B_T[~spaced.mask_B_T] != 0).any():
        raise Broken("an observation token has an advantage other than 0")
    same([out.gather(1, places_B_T) for out in result.outputs()], run(subject, world))


def others(subject: Subject, world: World) -> None:
    """Other prompts in the batch change nothing (operators of batch scope are exempt)."""
    other = make_world(1000, group_sizes=(3, 2))
    other = other.but(group_B=other.group_B + 10_000, gain_B_K=other.gain_B_K * 50)
    rows, width = world.mask_B_T.shape
    both = [out[:rows, :width] for out in run(subject, beside(world, other))]
    same(both, run(subject, world))


def width(subject: Subject, world: World) -> None:
    """The contents of padding do not matter."""
    columns = world.mask_B_T.shape[1]
    same([out[:, :columns] for out in run(subject, world.wider(2, 5))], run(subject, world))


def dtype(subject: Subject, world: World) -> None:
    """Half precision is only a coarser input: statistics are float64, results at least float32."""
    for kind in HALVES:
        coarse = world.to(kind)
        ours, exact = subject.run(coarse), subject.run(coarse.to(torch.float64))
        if ours.advantage_B_T.dtype != torch.float32:
            raise Broken(f"{kind} gave {ours.advantage_B_T.dtype}; expected float32", runs=2)
        same([out.double() for out in ours.outputs()], exact.outputs(), tolerance=1e-5, what=str(kind))


def layout(subject: Subject, world: World) -> None:
    """Memory layout does not matter."""
    strided = world.map(lambda tensor: tensor.T.contiguous().T if tensor.dim() == 2 else tensor)
    same(run(subject, strided), run(subject, world))


def padding_rows(subject: Subject, world: World) -> None:
    """Rows that are not valid get 0 and change nothing, whatever is in them."""
    rows = len(world.outcome_B)
    copies = world.rows(torch.arange(min(4, rows)))
    copies = copies.but(
        valid_B=torch.zeros(len(copies.outcome_B), dtype=torch.bool),
        outcome_B=torch.tensor([NAN, 1e9, 1.0, -1e9], dtype=torch.float64)[: len(copies.outcome_B)],
        log_prob_B_T=copies.log_prob_B_T * 3,
        entropy_B_T=copies.entropy_B_T * 3,
        gain_B_K=torch.full_like(copies.gain_B_K, NAN),
    )
    both = run(subject, beside(world, copies))
    if (both[0][rows:] != 0).any():
        raise Broken("a row that is not valid has an advantage other than 0")
    same([out[:rows] for out in both], run(subject, world))


def nonfinite(subject: Subject, world: World) -> None:
    """A number that is not finite harms its own row or prompt only and is counted, or is refused by name."""
    if subject.level in ("token", "whole"):
        row, place = world.mask_B_T.nonzero()[0].tolist()
        spoiled = {name: getattr(world, name).clone() for name in ("log_prob_B_T", "entropy_B_T")}
        for tensor in spoiled.values():
            tensor[row, place] = NAN
        try:
            finite(run(subject, world.but(**spoiled)))
        except ValueError as error:
            if f"row {row}" not in str(error):
                raise Broken(f"NaN in row {row}: the error does not name the row ({error})") from error
        return
    rows_B = torch.arange(len(world.outcome_B))
    has_gain_B = world.has_gain_B_K.any(dim=1)
    row = int(has_gain_B.long().argmax())
    result = subject.run(world.but(outcome_B=torch.where(rows_B == row, NAN, world.outcome_B)))
    if result.counts["nonfinite_outcomes"] != 1:
        raise Broken("an outcome of NaN is not counted")
    without = subject.run(world.but(valid_B=rows_B != row))
    same(result.outputs(), without.outputs(), what="an outcome of NaN")
    if not has_gain_B[row]:
        return
    gain_B_K = world.gain_B_K.clone()
    gain_B_K[row, int(world.has_gain_B_K[row].long().argmax())] = float("inf")
    result = subject.run(world.but(gain_B_K=gain_B_K))
    finite(result.outputs())
    if result.counts["nonfinite_rewards"] != 1:
        raise Broken("a gain of inf is not counted")
    if subject.scope != "batch":
        elsewhere_B = world.group_B != world.group_B[row]
        plain = run(subject, world)
        ours = [out[elsewhere_B] for out in result.outputs()]
        same(ours, [out[elsewhere_B] for out in plain], what="inf in a gain")


def _edges(seed: int) -> Iterable[World]:
    yield from (make_world(seed, turns=turns) for turns in (0, 1, 20))
    yield from (make_world(seed, group_sizes=sizes) for sizes in ((1, 1, 1), (2, 16)))
    yield make_world(seed, silent_rows=3)


@on(_edges)
def edges(subject: Subject, world: World) -> None:
    """No turns, one turn, twenty; groups of one and of sixteen; rows without a token: all finite."""
    outputs = run(subject, world)
    if any(out.shape != world.mask_B_T.shape for out in outputs):
        raise Broken(f"result of shape {tuple(outputs[0].shape)} for {tuple(world.mask_B_T.shape)}")
    finite(outputs, what="numbers that are finite went in, and")


def travels(subject: Subject, world: World) -> None:
    """No gradient flows, and the operator pickles."""
    fields = ("outcome_B", "gain_B_K", "log_prob_B_T", "entropy_B_T")
    learning = world.but(**{name: getattr(world, name).clone().requires_grad_() for name in fields})
    if any(out.requires_grad for out in run(subject, learning)):
        raise Broken("gradients flow through the result")
    try:
        pickle.loads(pickle.dumps(subject.function))
    except Exception as error:
        raise Broken(f"does not pickle, so cannot travel to a worker: {error}") from error


def run(subject: Subject, world: World) -> tuple[torch.Tensor, torch.Tensor]:
    return subject.run(world).outputs()


def plain() -> World:
    world = make_world(0, group_sizes=(2,), turns=1)
    return world.but(outcome_B=torch.tensor([1.0, 0.0], dtype=torch.float64))


@on(lambda seed: [plain()])
def runs(subject: Subject, world: World) -> None:
    """The operator accepts two rows of one prompt, one of them solved."""
    subject.run(world)


@on(lambda seed: [*([plain()] if seed == 0 else []), *usual_worlds(seed)])
def pure(subject: Subject, world: World) -> None:
    """The same input gives the same bits, whatever was called before and however often; inputs stay as they are."""
    before = world.map(torch.clone)
    first = _outputs(subject, world)
    _outputs(subject, make_world(7, group_sizes=(2, 3)))
    _unchanged(subject, world, first)
    if subject.call is not None and len(world.outcome_B) == 2:
        repeat(subject.call)
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
    """Returns the outputs, or the name of the error: other laws report an operator that always raises."""
    try:
        return run(subject, world)
    except Exception as error:
        return type(error).__name__


def repeat(call: Callable[[], Any]) -> None:
    """Calls the bare function `CALLS` times, or for `SECONDS` if it is slow, or until it raises."""
    until = time.monotonic() + SECONDS
    with suppress(Exception):
        for number in range(CALLS):
            call()
            if number % 100 == 0 and time.monotonic() > until:
                return
