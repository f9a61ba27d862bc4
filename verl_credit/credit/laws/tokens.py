"""The laws of token operators: turns, uncertainties, and inputs that may be absent."""

import torch

from verl_credit.credit.laws.broken import CLOSE, Broken, finite, same, scale_of
from verl_credit.credit.laws.laws import run
from verl_credit.credit.laws.subjects import Subject
from verl_credit.credit.laws.world import World
from verl_credit.credit.token.gtpo import SMALLEST_MEAN

ROWS = 4
A_LITTLE = 1.001
TWICE = 2.0
FEWEST = 4  # tokens of a row, so that most of them can stay where one moves


def turns(subject: Subject, world: World) -> None:
    """A turn's advantage goes to the turn's own tokens, at least twice as much as to those of another turn."""
    if not subject.reads_turns:
        return
    given_B_T = subject.given(world).advantage_B_T
    ids_B_T = torch.where(world.counted_B_T, world.turn_ids_B_T, -1)
    plain_B_T = subject.apply(world, given_B_T)
    nothing = CLOSE[plain_B_T.dtype] * scale_of(plain_B_T)
    rows = [row for row in range(len(ids_B_T)) if ids_B_T[row].max() > 0][:ROWS]
    for row in rows:
        own_sum = other_sum = 0.0
        for turn in range(int(ids_B_T[row].max()) + 1):
            raised_B_T = given_B_T.clone()
            raised_B_T[row, ids_B_T[row] == turn] += 0.5
            change_B_T = subject.apply(world, raised_B_T) - plain_B_T
            moves = [
                change_B_T[row, ids_B_T[row] == k].mean().item() for k in ids_B_T[row].unique() if k >= 0
            ]
            own_sum += moves.pop(turn)
            other_sum += max(map(abs, moves))
        if own_sum < TWICE * other_sum and max(abs(own_sum), other_sum) > nothing:
            subject.apply(world, given_B_T)  # the report shows the last run
            raise Broken(
                f"row {row}: a turn's advantage raised by 0.5 raises its own tokens by {own_sum:.3g} and another "
                f"turn's by up to {other_sum:.3g} (summed over the turns)",
                runs=2,
            )


def follows(subject: Subject, world: World) -> None:
    """A token's uncertainty moves the token's own weight: raised a little, it never moves another token alone."""
    if subject.level not in ("token", "whole"):
        return

    def result(one: World) -> torch.Tensor:
        if subject.apply is None:
            return run(subject, one)[0]
        return subject.apply(one, one.counted_B_T.double())

    before_B_T = result(world)
    row = int((world.counted_B_T & (before_B_T != 0)).sum(dim=1).argmax())
    places = world.counted_B_T[row].nonzero().flatten()
    before_t = before_B_T[row, places]
    used_t = before_t != 0
    if used_t.sum() < FEWEST:
        return
    for t, place in enumerate(places.tolist()):
        raised = {name: getattr(world, name).clone() for name in ("log_prob_B_T", "entropy_B_T")}
        for tensor in raised.values():
            tensor[row, place] *= A_LITTLE
        after_t = result(world.but(**raised))[row, places]
        common = (after_t[used_t] / before_t[used_t]).median()
        moved_t = (after_t - common * before_t).abs() > 1e-7 * before_t.abs().max()
        if moved_t.sum() == 1 and not moved_t[t]:
            raise Broken(
                f"row {row}: the uncertainty of its policy token {t}, raised by a thousandth, moves policy token "
                f"{int(moved_t.nonzero()[0])} alone"
            )


def flat(subject: Subject, world: World) -> None:
    """Uncertainties that are constant, tiny or 0 give finite advantages."""
    if subject.level not in ("token", "whole"):
        return
    for value in (1.0, 1e-12, 0.0):
        constant_B_T = torch.where(world.mask_B_T, value, world.entropy_B_T)
        flat = world.but(log_prob_B_T=-constant_B_T, entropy_B_T=constant_B_T)
        finite(run(subject, flat), what=f"uncertainties of {value:g} went in, and")


def weighs_by(subject: Subject, world: World) -> None:
    """An uncertainty is not negative, and large enough to weigh by: with a mean below 1e-7 all weights are 1."""
    if subject.uncertainty is None:
        return
    subject.run(world)
    mask_B_T = world.counted_B_T
    for row in mask_B_T.any(dim=1).nonzero().flatten().tolist():
        values_t = subject.uncertainty(world)[row, mask_B_T[row]]
        low, high, mean = float(values_t.min()), float(values_t.max()), float(values_t.mean())
        if low < -CLOSE[values_t.dtype] * scale_of(values_t):
            raise Broken(f"row {row}: an uncertainty of {low:.3g}")
        if mean < SMALLEST_MEAN and high > low * (1 + 1e-6):
            raise Broken(f"row {row}: uncertainties from {low:.3g} to {high:.3g}")


def absent(subject: Subject, world: World) -> None:
    """The absence of an undeclared input (needs_planning, reads = ("entropy", "planning mask")) changes nothing."""
    if subject.level not in ("token", "whole"):
        return
    for name, field in (("planning mask", "planning_B_T"), ("entropy", "entropy_B_T")):
        if name not in subject.reads:
            same(run(subject, world.but(**{field: None})), run(subject, world), what=f"no {name}")
