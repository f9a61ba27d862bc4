"""The laws of effects: what rewards, turns and uncertainties change in the advantages. Then the optional properties.

Properties are tested like laws and reported; a property that fails is an error only if the operator declares it.
"""

from collections.abc import Callable, Iterable

import torch

from verl_credit.credit.groups import row_mean
from verl_credit.credit.laws.drawn_world import World, make_world
from verl_credit.credit.laws.laws import ABOUT, CLOSE, Broken, finite, on, plain, run, same, scale_of
from verl_credit.credit.laws.subjects import Subject, run_turn_mode
from verl_credit.credit.token.gtpo import SMALLEST_MEAN
from verl_credit.credit.turn.mode import TurnMode
from verl_credit.credit.turn.modes import MODES

INEXACT = 0.35  # a mean of such outcomes is rounded, that of 0 or 1 is exact
RESIDUE = 1e-7  # the rounding of a mean (1e-16) over the epsilon of a denominator (1e-8), ten times wider
ROWS = 4
TOOL_TURNS = "better_tools"  # an exemption from `better` for tool turns: the answer stays bound
FEWEST = 4  # tokens of a row, so that most of them can stay where one moves


def ties(subject: Subject, world: World) -> None:
    """A prompt whose outcomes are equal, without gains, gets 0, in float32 too (0.35)."""
    world = world.without_gains()
    scale = scale_of(subject.run(plain()).advantage_B_T)  # the batch has two rows, and one is solved
    for value in (0.0, INEXACT, 1.0):
        tied = world.but(outcome_B=torch.full_like(world.outcome_B, value))
        for dtype in (torch.float32, torch.float64):
            advantage_B_T = subject.run(tied.to(dtype)).advantage_B_T
            largest, limit = advantage_B_T.abs().max(), CLOSE[advantage_B_T.dtype]
            limit = scale * max(limit, RESIDUE if value == INEXACT else 0.0)
            if subject.operator is not None:
                limit = 0.0  # a registered operator gives exactly 0
            if not largest <= limit:
                raise Broken(f"all outcomes {value} in {dtype}: advantages up to {largest:.3g}")


def better(subject: Subject, world: World) -> None:
    """A better outcome never lowers its row's advantage (the mean of its tool turns' tokens, and that of its answer's)."""
    bound_2 = torch.tensor([TOOL_TURNS not in subject.exempt, True])
    rows_B = torch.arange(len(world.outcome_B))
    before_B_2 = _tools_and_answer(subject, world)
    scale = scale_of(before_B_2)
    unsolved = rows_B[world.outcome_B < 1].tolist()  # outcomes stay at most 1
    for row in unsolved[:: -(-len(unsolved) // ROWS) or 1]:
        raised_B = world.outcome_B + 0.5 * (rows_B == row)
        before_2, after_2 = before_B_2[row], _tools_and_answer(subject, world.but(outcome_B=raised_B))[row]
        fell_2 = after_2 < before_2 - CLOSE[before_2.dtype] * scale
        if (fell_2 & bound_2).any():
            run(subject, world)  # the report shows the last run
            part = int((fell_2 & bound_2).nonzero()[-1])
            raise Broken(
                f"row {row}, outcome {float(raised_B[row]):g} in place of {float(world.outcome_B[row]):g}: the mean "
                f"advantage of its {('tool turns', 'answer')[part]} falls from {float(before_2[part]):.6g} to "
                f"{float(after_2[part]):.6g}",
                runs=2,
            )


def _tools_and_answer(subject: Subject, world: World) -> torch.Tensor:
    """Each row's mean advantage of its tool turns' tokens, 0 without one, and of its answer's tokens."""
    advantage_B_T, mask_B_T = run(subject, world)[0], world.counted_B_T
    last_B_1 = torch.where(mask_B_T, world.turn_ids_B_T, 0).amax(dim=1, keepdim=True)
    answer_B_T = mask_B_T & (world.turn_ids_B_T == last_B_1)
    parts = (mask_B_T & ~answer_B_T, answer_B_T)
    return torch.cat([row_mean(advantage_B_T, part_B_T) for part_B_T in parts], dim=1)


def _signed(seed: int) -> Iterable[World]:
    world = make_world(seed)
    yield world.but(outcome_B=world.outcome_B * 2 - 1)
    yield world.but(outcome_B=world.outcome_B - 2)
    if seed == 0:
        world = make_world(seed, group_sizes=(16, 2))
        yield world.but(outcome_B=world.outcome_B * 2 - 1)


@on(_signed)
def signed(subject: Subject, world: World) -> None:
    """All outputs are finite when rewards are below 0, and a better reward never lowers its row's advantage."""
    finite(run(subject, world), what="rewards below 0 went in, and")
    if "better" not in subject.exempt:
        better(subject, world)


def no_gains(subject: Subject, world: World) -> None:
    """A turn mode without gains is `none` times its stated factor of the group's size, and clips as `none`."""
    if not isinstance(subject.operator, TurnMode):
        return
    world = world.without_gains()
    stated = subject.operator.without_gains
    bare = run_turn_mode(world, mode=MODES["none"], norm_by_std=stated.norm_by_std)
    size_B = (world.group_B[:, None] == world.group_B).sum(dim=1)
    factor_B = torch.tensor([stated.factor(int(n)) for n in size_B], dtype=torch.float64)
    expected = (bare.advantage_B_T * factor_B[:, None], bare.clip_scale_B_T)
    same(run(subject, world), expected, tolerance=1e-5, runs=1)  # the variance floor is inside


def reads(subject: Subject, world: World) -> None:
    """Given the turns' advantages, a token operator depends on no outcome and no gain."""
    if subject.apply is not None:
        given_B_T = subject.run(world).advantage_B_T.sign()
        other = world.but(outcome_B=1 - world.outcome_B).without_gains()
        same([subject.apply(other, given_B_T)], [subject.apply(world, given_B_T)], what="outcomes or gains")


def turns(subject: Subject, world: World) -> None:
    """A turn's advantage goes to the turn's own tokens, at least twice as much as to those of another turn."""
    apply, given = subject.apply, subject.given
    if not subject.reads_turns or apply is None or given is None:
        return
    given_B_T, ids_B_T = given(world).advantage_B_T, torch.where(world.counted_B_T, world.turn_ids_B_T, -1)
    plain_B_T = apply(world, given_B_T)
    nothing = CLOSE[plain_B_T.dtype] * scale_of(plain_B_T)
    rows = [row for row in range(len(ids_B_T)) if ids_B_T[row].max() > 0][:ROWS]
    for row in rows:
        own_sum = other_sum = 0.0
        for turn in range(int(ids_B_T[row].max()) + 1):
            raised_B_T = given_B_T.clone()
            raised_B_T[row, ids_B_T[row] == turn] += 0.5
            change_B_T = apply(world, raised_B_T) - plain_B_T
            moves = [
                change_B_T[row, ids_B_T[row] == k].mean().item() for k in ids_B_T[row].unique() if k >= 0
            ]
            own_sum += moves.pop(turn)
            other_sum += max(map(abs, moves))
        if own_sum < 2 * other_sum and max(abs(own_sum), other_sum) > nothing:
            apply(world, given_B_T)  # the report shows the last run
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
            tensor[row, place] *= 1.001
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
        constant = world.but(log_prob_B_T=-constant_B_T, entropy_B_T=constant_B_T)
        finite(run(subject, constant), what=f"uncertainties of {value:g} went in, and")


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


def centred(subject: Subject, world: World) -> None:
    """Adding a constant to all outcomes leaves the advantages unchanged."""
    shifted = world.but(outcome_B=world.outcome_B + 16)
    same(run(subject, shifted), run(subject, world), tolerance=ABOUT)


def normalised(subject: Subject, world: World) -> None:
    """Multiplying all outcomes by a positive constant leaves the advantages unchanged (up to the variance floor)."""
    scaled = world.but(outcome_B=world.outcome_B * 3)
    if subject.unfloored is None:
        same(run(subject, scaled), run(subject, world), tolerance=ABOUT)
    else:  # a small spread of gains and outcomes together has no bound for its floor
        same(subject.unfloored(scaled).outputs(), subject.unfloored(world).outputs())


def weighs(subject: Subject, world: World) -> None:
    """Token level: advantages are multiplied by something non-negative, whatever their size."""
    apply, given_B_T = _applied(subject, world)
    once, thrice = apply(world, given_B_T), apply(world, given_B_T * 3)
    same([thrice], [once * 3], what="advantages three times as large")
    if (once * given_B_T < -CLOSE[once.dtype] * scale_of(once)).any():
        raise Broken("a token's advantage has the other sign than its turn's")


def conserves(subject: Subject, world: World) -> None:
    """Token level: the mean advantage over a trajectory's tokens stays what it was, where all its turns have the same."""
    apply, given_B_T = _applied(subject, world)
    mask_B_T = world.counted_B_T
    ours_B = torch.where(mask_B_T, apply(world, given_B_T), 0.0).sum(dim=1)
    same([ours_B[:, None]], [torch.where(mask_B_T, given_B_T, 0.0).sum(dim=1)[:, None]], tolerance=1e-6)


def _applied(subject: Subject, world: World) -> tuple[Callable, torch.Tensor]:
    """Returns the operator, and advantages that are the same for all turns of a row."""
    if subject.apply is None:
        raise Broken(f"{subject.level} level: the operator gets no turn advantage")
    sign_B = torch.where(torch.arange(len(world.outcome_B)) % 2 == 0, 1.0, -0.5).double()
    return subject.apply, torch.where(world.counted_B_T, sign_B[:, None], 0.0)


PROPERTIES: dict[str, Callable[[Subject, World], None]] = {
    law.__name__: law for law in (centred, normalised, weighs, conserves)
}
