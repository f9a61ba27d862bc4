"""The laws of rewards: ties, better and negative ones, and what each level may read."""

from collections.abc import Iterable

import torch

from verl_credit.credit.groups import row_mean
from verl_credit.credit.laws.broken import CLOSE, Broken, finite, same, scale_of
from verl_credit.credit.laws.laws import on, plain, run
from verl_credit.credit.laws.subjects import Subject, run_turn_mode
from verl_credit.credit.laws.world import World, make_world
from verl_credit.credit.turn.modes import MODES

INEXACT = 0.35  # a mean of such outcomes is rounded, that of 0 or 1 is exact
RESIDUE = 1e-7  # the rounding of a mean (1e-16) over the epsilon of a denominator (1e-8), ten times wider
ROWS = 4
TOOL_TURNS = "better_tools"  # an exemption from `better` for tool turns: the answer stays bound


def ties(subject: Subject, world: World) -> None:
    """A prompt whose outcomes are equal, without gains, gets 0, in float32 too (0.35)."""
    world = world.without_gains()
    scale = scale_of(subject.run(plain()).advantage_B_T)  # of two rows, one of them solved
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
    if subject.level != "turn" or subject.operator is None:
        return
    world = world.without_gains()
    stated = subject.operator.without_gains
    plain = run_turn_mode(world, mode=MODES["none"], norm_by_std=stated.norm_by_std)
    size_B = (world.group_B[:, None] == world.group_B).sum(dim=1)
    factor_B = torch.tensor([stated.factor(int(n)) for n in size_B], dtype=torch.float64)
    expected = (plain.advantage_B_T * factor_B[:, None], plain.clip_scale_B_T)
    same(run(subject, world), expected, tolerance=1e-5, runs=1)  # the variance floor is inside


def reads(subject: Subject, world: World) -> None:
    """An operator depends on nothing that its level does not read; an outcome operator gets outcomes only."""
    flipped = world.but(planning_B_T=~world.planning_B_T)
    halved = flipped.but(log_prob_B_T=world.log_prob_B_T * 0.5, entropy_B_T=world.entropy_B_T * 0.5)
    if subject.level == "turn":
        same(run(subject, halved), run(subject, world), what="tokens")
    elif subject.level == "token":
        # given the turns' advantages, a token operator must not depend on outcomes and gains
        given_B_T = subject.run(world).advantage_B_T.sign()
        other = world.but(outcome_B=1 - world.outcome_B).without_gains()
        same([subject.apply(other, given_B_T)], [subject.apply(world, given_B_T)], what="outcomes or gains")
    elif subject.level == "whole" and "gains" not in subject.reads:
        same(run(subject, world.without_gains()), run(subject, world), what="gains")
