"""Optional properties of operators: tested like laws and reported, an error only if declared."""

from collections.abc import Callable

import torch

from verl_credit.credit.laws.broken import ABOUT, CLOSE, Broken, same, scale_of
from verl_credit.credit.laws.subjects import Subject
from verl_credit.credit.laws.world import World


def centred(subject: Subject, world: World) -> None:
    """A constant added to all outcomes does nothing."""
    shifted = world.but(outcome_B=world.outcome_B + 16)
    same(subject.run(shifted).outputs(), subject.run(world).outputs(), tolerance=ABOUT)


def normalised(subject: Subject, world: World) -> None:
    """Outcomes times a positive constant do nothing (up to the variance floor)."""
    scaled = world.but(outcome_B=world.outcome_B * 3)
    same(subject.run(scaled).outputs(), subject.run(world).outputs(), tolerance=ABOUT)


def weighs(subject: Subject, world: World) -> None:
    """Token level: advantages are multiplied by something non-negative, whatever their size."""
    given_B_T = _given(subject, world)
    once, thrice = subject.apply(world, given_B_T), subject.apply(world, given_B_T * 3)
    same([thrice], [once * 3], what="advantages three times as large")
    if (once * given_B_T < -CLOSE[once.dtype] * scale_of(once)).any():
        raise Broken("a token's advantage has the other sign than its turn's")


def conserves(subject: Subject, world: World) -> None:
    """Token level: the mean advantage over a trajectory's tokens stays what it was, where all its turns have the same."""
    given_B_T = _given(subject, world)
    mask_B_T = world.counted_B_T
    ours_B = torch.where(mask_B_T, subject.apply(world, given_B_T), 0.0).sum(dim=1)
    same([ours_B[:, None]], [torch.where(mask_B_T, given_B_T, 0.0).sum(dim=1)[:, None]], tolerance=1e-6)


def _given(subject: Subject, world: World) -> torch.Tensor:
    if subject.apply is None:
        raise Broken(f"{subject.level} level: the operator gets no turn advantage")
    sign_B = torch.where(torch.arange(len(world.outcome_B)) % 2 == 0, 1.0, -0.5).double()
    return torch.where(world.counted_B_T, sign_B[:, None], 0.0)


PROPERTIES: dict[str, Callable[[Subject, World], None]] = {
    law.__name__: law for law in (centred, normalised, weighs, conserves)
}
