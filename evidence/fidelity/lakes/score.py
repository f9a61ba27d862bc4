"""True advantages of moves where the tool has chances of its own.

    Q(s, a) = sum over landings of P (r or V(s'))      A* = Q(s, a) - V(s)      luck = (r or V(s') of what came) - Q(s, a)

A* is what the policy did, luck what the ice did; A* + luck is the change of V that the trajectory saw. Without chance luck
is 0 and A* is that of `fidelity.values`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from lakes.dynamic import ExactValue
from lakes.world import GridWorld
from verl_credit.study.fidelity.agreements import SURE
from verl_credit.study.fidelity.values import ScoredTurn, Value, part_of
from verl_credit.worlds.rollouts.protocol import State, Step
from verl_credit.worlds.rollouts.rollout import Trajectory
from verl_credit.worlds.rollouts.sampler import digest

WORTH_AN_ORDER = 0.05
"""Of two turns whose A* are known exactly: less of a difference is not asked for."""
Values = Mapping[str, Value | ExactValue]


def states_to_value(world: GridWorld, groups: Sequence[Sequence[Trajectory]]) -> list[State]:
    """The distinct contexts before the turns, and those in which a turn could have ended."""
    found = {}
    for step in _steps(groups):
        after = [other.next for _, other in world.chances(step.state, step.turn_ids)]
        found |= {state.ids: state for state in (step.state, *after) if state is not None}
    return list(found.values())


def score_moves(
    world: GridWorld, groups: Sequence[Sequence[Trajectory]], values: Values
) -> tuple[list[ScoredTurn], list[float]]:
    """(every turn with A*, the luck of each). A turn that moves is a ``tool`` turn, also where the episode ends with it;
    ``ending`` is a text that is no call."""
    least = (
        WORTH_AN_ORDER / SURE
    ) ** 2 / 2  # of each turn's variance: then 4 standard errors are that difference
    scored, luck = [], []
    for prompt, group in enumerate(groups):
        for number, trajectory in enumerate(group):
            for turn, step in enumerate(trajectory.steps):
                before = values[digest(step.state.ids)]
                chances = world.chances(step.state, step.turn_ids)
                q, first, second = (
                    sum(p * _ends(other, values)[part] for p, other in chances) for part in range(3)
                )
                after = sum(p * p * _variance(other, values) for p, other in chances)
                variance = max(before.variance, least)
                scored.append(
                    ScoredTurn(
                        prompt=prompt,
                        trajectory=number,
                        turn=turn,
                        kind="ending" if world.move_of(step.turn_ids) is None else "tool",
                        before=before.context,
                        after=None if step.next is None else digest(step.next.ids),
                        a_star=q - before.value,
                        a_first=first - before.halves[0],
                        a_second=second - before.halves[1],
                        se=(variance + after) ** 0.5,
                        variance_before=variance,
                        variance_after=after,
                        gain=None,
                        outcome=trajectory.reward,
                    )
                )
                luck.append(_ends(step, values)[0] - q)
    return scored, luck


def by_second_half(
    turns: Sequence[ScoredTurn],
    world: GridWorld,
    groups: Sequence[Sequence[Trajectory]],
    values: Mapping[str, Value],
) -> list[ScoredTurn]:
    """The same turns with A* and its errors by the second half of the continuations alone."""
    half = next(iter(values.values())).continuations // 2
    second, _ = score_moves(world, groups, part_of(values, slice(half, None)))
    errors = ("a_star", "se", "variance_before", "variance_after")
    return [
        replace(turn, **{name: getattr(other, name) for name in errors})
        for turn, other in zip(turns, second, strict=True)
    ]


def _ends(step: Step, values: Values) -> tuple[float, float, float]:
    """V behind the step, by all continuations and by each half; its reward where the episode ends."""
    if step.next is None:
        return (step.reward,) * 3
    after = values[digest(step.next.ids)]
    return after.value, *after.halves


def _variance(step: Step, values: Values) -> float:
    return 0.0 if step.next is None else values[digest(step.next.ids)].variance


def _steps(groups: Sequence[Sequence[Trajectory]]) -> list[Step]:
    return [step for group in groups for trajectory in group for step in trajectory.steps]
