"""The laws: each takes a subject and a seed, and raises `Broken` with a counterexample."""

from __future__ import annotations

import pickle
from collections.abc import Callable

import torch

from verl_credit.credit.laws.subjects import Subject, run_turn_mode
from verl_credit.credit.laws.world import NAN, World, beside, make_world
from verl_credit.credit.turn.modes import MODES

CLOSE = 1e-9  # float64 in and out, so only the order of a sum may make a difference
HALVES = (torch.float16, torch.bfloat16, torch.float32)


class Broken(AssertionError):
    """A law does not hold; the message is the counterexample."""


def order(subject: Subject, seed: int) -> None:
    """Permuting rows permutes the result."""
    world = make_world(seed)
    shuffled = torch.randperm(len(world.outcome_B), generator=torch.Generator().manual_seed(seed + 1))
    same(_run(subject, world.rows(shuffled)), [out[shuffled] for out in _run(subject, world)])


def observations(subject: Subject, seed: int) -> None:
    """Observation tokens get exactly 0, and more of them change nothing on the policy's tokens."""
    world = make_world(seed)
    rows, width = world.mask_B_T.shape
    random = torch.Generator().manual_seed(seed)
    places_B_T = torch.rand(rows, width + 6, generator=random).argsort(dim=1)[:, :width].sort(dim=1).values
    spaced = world.spaced(places_B_T, width + 6)
    result = subject.run(spaced)
    if (result.advantage_B_T[~spaced.mask_B_T] != 0).any():
        raise Broken("an observation token has an advantage other than 0")
    same([out.gather(1, places_B_T) for out in result.outputs()], _run(subject, world))


def others(subject: Subject, seed: int) -> None:
    """Other prompts in the batch change nothing (operators of batch scope are exempt)."""
    world, other = make_world(seed), make_world(seed + 1000, group_sizes=(3, 2))
    other = other.but(group_B=other.group_B + 10_000, gain_B_K=other.gain_B_K * 50)
    rows, width = world.mask_B_T.shape
    both = [out[:rows, :width] for out in _run(subject, beside(world, other))]
    same(both, _run(subject, world))


def ties(subject: Subject, seed: int) -> None:
    """A prompt whose outcomes are equal, without gains, gets exactly 0, in float32 too (0.35)."""
    world = make_world(seed).without_gains()
    for value in (0.0, 0.35, 1.0):
        tied = world.but(outcome_B=torch.full_like(world.outcome_B, value))
        for dtype in (torch.float32, torch.float64):
            advantage_B_T = subject.run(tied.to(dtype)).advantage_B_T
            if (advantage_B_T != 0).any():
                raise Broken(
                    f"all outcomes {value} in {dtype}: advantages up to {advantage_B_T.abs().max():.3g}"
                )


def no_gains(subject: Subject, seed: int) -> None:
    """Without gains a turn mode is `none` times its stated factor of the group's size, and clips as `none`."""
    if subject.level != "turn" or subject.operator is None:
        return
    world = make_world(seed).without_gains()
    stated = subject.operator.without_gains
    plain = run_turn_mode(world, mode=MODES["none"], norm_by_std=stated.norm_by_std)
    size_B = (world.group_B[:, None] == world.group_B).sum(dim=1)
    factor_B = torch.tensor([stated.factor(int(n)) for n in size_B], dtype=torch.float64)
    expected = (plain.advantage_B_T * factor_B[:, None], plain.clip_scale_B_T)
    same(_run(subject, world), expected, tolerance=1e-5)  # the variance floor is inside


def reads(subject: Subject, seed: int) -> None:
    """An operator depends on nothing that its level does not read."""
    world = make_world(seed)
    flipped = world.but(planning_B_T=~world.planning_B_T)
    halved = flipped.but(log_prob_B_T=world.log_prob_B_T * 0.5, entropy_B_T=world.entropy_B_T * 0.5)
    if subject.level == "outcome":
        same(_run(subject, halved.without_gains()), _run(subject, world), what="what only other levels read")
    elif subject.level == "turn":
        same(_run(subject, halved), _run(subject, world), what="tokens")
    elif subject.level == "token":
        # given the turns' advantages, a token operator must not depend on outcomes and gains
        given_B_T = subject.run(world).advantage_B_T.sign()
        other = world.but(outcome_B=1 - world.outcome_B).without_gains()
        same([subject.apply(other, given_B_T)], [subject.apply(world, given_B_T)], what="outcomes or gains")
    else:
        same(_run(subject, world.without_gains()), _run(subject, world), what="gains")


def width(subject: Subject, seed: int) -> None:
    """The contents of padding do not matter."""
    world = make_world(seed)
    columns = world.mask_B_T.shape[1]
    same([out[:, :columns] for out in _run(subject, world.wider(2, 5))], _run(subject, world))


def dtype(subject: Subject, seed: int) -> None:
    """Half precision is only a coarser input: statistics are float64, results at least float32."""
    world = make_world(seed)
    for kind in HALVES:
        coarse = world.to(kind)
        ours, exact = subject.run(coarse), subject.run(coarse.to(torch.float64))
        if ours.advantage_B_T.dtype != torch.float32:
            raise Broken(f"{kind} gave {ours.advantage_B_T.dtype}; expected float32")
        same([out.double() for out in ours.outputs()], exact.outputs(), tolerance=1e-5, what=str(kind))


def layout(subject: Subject, seed: int) -> None:
    """Memory layout does not matter."""
    world = make_world(seed)
    same(_run(subject, world.strided()), _run(subject, world))


def padding_rows(subject: Subject, seed: int) -> None:
    """Rows that are not valid get 0 and change nothing, whatever is in them."""
    world = make_world(seed)
    copies = world.rows(torch.arange(4))
    copies = copies.but(
        valid_B=torch.zeros(4, dtype=torch.bool),
        outcome_B=torch.tensor([NAN, 1e9, 1.0, -1e9], dtype=torch.float64),
        log_prob_B_T=copies.log_prob_B_T * 3,
        entropy_B_T=copies.entropy_B_T * 3,
        gain_B_K=torch.full_like(copies.gain_B_K, NAN),
    )
    rows = len(world.outcome_B)
    both = _run(subject, beside(world, copies))
    if (both[0][rows:] != 0).any():
        raise Broken("a row that is not valid has an advantage other than 0")
    same([out[:rows] for out in both], _run(subject, world))


def nonfinite(subject: Subject, seed: int) -> None:
    """A number that is not finite harms its own row or prompt only and is counted, or is refused by name."""
    world = make_world(seed)
    if subject.level in ("token", "whole"):
        _refused(subject, world)
        return
    row = int((world.has_gain_B_K.any(dim=1)).nonzero()[0])
    same_prompt_B = world.group_B == world.group_B[row]
    outcome_B = torch.where(torch.arange(len(world.outcome_B)) == row, NAN, world.outcome_B)
    result = subject.run(world.but(outcome_B=outcome_B))
    without = subject.run(world.but(valid_B=torch.arange(len(outcome_B)) != row))
    same(result.outputs(), without.outputs(), what="an outcome of NaN")
    if result.counts["nonfinite_outcomes"] != 1:
        raise Broken("an outcome of NaN is not counted")
    gain_B_K = world.gain_B_K.clone()
    gain_B_K[row, 0] = float("inf")
    result = subject.run(world.but(gain_B_K=gain_B_K))
    _finite(result.outputs())
    if result.counts["nonfinite_rewards"] != 1:
        raise Broken("a gain of inf is not counted")
    if subject.scope != "batch":
        mine, plain = result.outputs(), _run(subject, world)
        same(
            [out[~same_prompt_B] for out in mine],
            [out[~same_prompt_B] for out in plain],
            what="inf in a gain",
        )


def edges(subject: Subject, seed: int) -> None:
    """No turns, one turn, twenty; groups of one and short groups; rows without a token: all finite."""
    for options in (
        {"turns": 0},
        {"turns": 1},
        {"turns": 20},
        {"group_sizes": (1, 1, 1)},
        {"group_sizes": (2, 16)},
        {"silent_rows": 3},
    ):
        world = make_world(seed, **options)
        outputs = _run(subject, world)
        if any(out.shape != world.mask_B_T.shape for out in outputs):
            raise Broken(
                f"{options}: result of shape {tuple(outputs[0].shape)} for {tuple(world.mask_B_T.shape)}"
            )
        _finite(outputs, what=str(options))


def pure(subject: Subject, seed: int) -> None:
    """The same input gives the same bits; inputs stay as they are; no gradient flows; the operator pickles."""
    world = make_world(seed)
    before = world.map(torch.clone)
    for name in ("outcome_B", "gain_B_K", "log_prob_B_T", "entropy_B_T"):
        getattr(world, name).requires_grad_()
    first, second = _run(subject, world), _run(subject, world)
    if any(out.requires_grad for out in first):
        raise Broken("gradients flow through the result")
    same(first, second, tolerance=0.0)
    for name, tensor in vars(before).items():
        now = getattr(world, name).detach()
        if not torch.equal(torch.nan_to_num(now.double()), torch.nan_to_num(tensor.double())):
            raise Broken(f"the operator changed its input {name}")
    try:
        pickle.loads(pickle.dumps(subject.function))
    except Exception as error:
        raise Broken(f"does not pickle, so cannot travel to a worker: {error}") from error


LAWS: dict[str, Callable[[Subject, int], None]] = {
    law.__name__: law
    for law in (
        order, observations, others, ties, no_gains, reads, width, dtype, layout, padding_rows, nonfinite, edges, pure,
    )
}  # fmt: skip


def _run(subject: Subject, world: World) -> tuple[torch.Tensor, torch.Tensor]:
    return subject.run(world).outputs()


def _refused(subject: Subject, world: World) -> None:
    row, place = world.mask_B_T.nonzero()[0].tolist()
    spoiled = {name: getattr(world, name).clone() for name in ("log_prob_B_T", "entropy_B_T")}
    for tensor in spoiled.values():
        tensor[row, place] = NAN
    try:
        _finite(_run(subject, world.but(**spoiled)))
    except ValueError as error:
        if f"row {row}" not in str(error):
            raise Broken(f"NaN in row {row}: the error does not name the row ({error})") from error


def _finite(outputs, what: str = "a value that is not finite went in, and") -> None:
    for out in outputs:
        if not out.isfinite().all():
            raise Broken(f"{what}: row {int((~out.isfinite()).nonzero()[0, 0])} of the result is not finite")


def same(ours, expected, *, tolerance: float = CLOSE, what: str = "") -> None:
    for name, a, b in zip(("advantage", "clip scale"), ours, expected, strict=False):
        far = (a - b).abs() > tolerance * (1 + b.abs())
        far |= a.isnan() != b.isnan()
        if far.any():
            row, place = far.nonzero()[0].tolist()
            raise Broken(
                f"{what + ': ' if what else ''}{name} of row {row}, token {place}: "
                f"{float(a[row, place]):.9g}, expected {float(b[row, place]):.9g}"
            )
