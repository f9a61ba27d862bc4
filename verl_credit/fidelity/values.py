"""The true value of every distinct context, and the true advantage of every turn.

    V(s)  = P(the final answer is right | s, policy at temperature 1), by M continuations to the end
    A*_k  = V(s_{k+1}) - V(s_k)   for a tool turn: s_{k+1} has its tool's answer
    A*_n  = r - V(s_n)            for the turn that ends the trajectory

The lab's retrieval is deterministic, so a turn's state after its tool follows from the turn alone.
"""

from __future__ import annotations

import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from math import isnan
from pathlib import Path

from verl_credit.errors import PreflightError
from verl_credit.fidelity.protocol import Protocol, State
from verl_credit.fidelity.rollout import Start, Trajectory, roll
from verl_credit.fidelity.sampler import TurnSampler, digest
from verl_credit.run.files import append_json, read_json_lines

VALUES, TURNS = "values.jsonl", "turns.jsonl"
PROMPTS_AT_ONCE = 4
Part = list[State]
"""Contexts that are valued together."""


@dataclass(frozen=True)
class Value:
    """``outcomes``: 1 for a continuation that ended right, 0 for another, in the order in which they were drawn."""

    context: str
    outcomes: str

    @property
    def continuations(self) -> int:
        return len(self.outcomes)

    @property
    def successes(self) -> int:
        return self.outcomes.count("1")

    @property
    def value(self) -> float:
        return self.successes / self.continuations

    @property
    def halves(self) -> tuple[float, float]:
        """V by each half alone: independent estimates."""
        half = self.continuations // 2
        first, second = (self.outcomes[part].count("1") for part in (slice(half), slice(half, None)))
        return first / half, second / (self.continuations - half)

    @property
    def variance(self) -> float:
        """Of the estimate: p (1 - p) / M with p = (successes + 1/2) / (M + 1), so that 0 of M is not taken for certain."""
        p = (self.successes + 0.5) / (self.continuations + 1)
        return p * (1 - p) / self.continuations


class Elsewhere(typing.Protocol):
    """Values of parts by other processes (`workers`): in any order, all of those that were taken."""

    def __call__(self, parts: Iterable[Part], *, continuations: int, seed: int) -> Iterator[list[Value]]: ...


@dataclass(frozen=True)
class ScoredTurn:
    """A turn of a sampled trajectory with its true advantage; ``after`` is None for the turn that ends."""

    prompt: int
    trajectory: int
    """Among the prompt's."""
    turn: int
    kind: str
    """``tool`` or ``ending``."""
    before: str
    after: str | None
    a_star: float
    a_first: float
    a_second: float
    """By the halves of the continuations alone."""
    se: float
    variance_before: float
    variance_after: float
    """0 for the ending turn: its reward is known."""
    gain: float | None
    """Information gain by the project's own scorer; None for the ending turn."""
    outcome: float
    value: float | None = None
    """V before the turn."""
    gold_probability: float | None = None
    """Of the gold answer before the turn, by that scorer."""
    brought: bool | None = None
    """A needed article, for the first time in its trajectory; None where the data set does not name them."""


def values_of(
    states: Iterable[State],
    sampler: TurnSampler,
    protocol: Protocol,
    *,
    continuations: int,
    seed: int,
    path: Path | None = None,
    prompts_at_once: int = PROMPTS_AT_ONCE,
    say: Callable[[int, int], None] = lambda done, of: None,
    enough: Callable[[], bool] = lambda: False,
    elsewhere: Elsewhere | None = None,
) -> dict[str, Value]:
    """V of every distinct context, by its digest. Values in ``path`` are taken from there, new ones are added to it as they
    come: a call that was cut off is repeated, and goes on. A value follows from the seed and the context alone.

    Prompts are valued in their order, ``prompts_at_once`` together, in this process or ``elsewhere``; before each such part
    but the first ``enough`` can end it.

    Raises PreflightError where ``path`` has values by another number of continuations.
    """
    if continuations < 2 or continuations % 2:
        raise PreflightError(f"--continuations {continuations}: expected an even number of at least 2")
    found = {} if path is None else _read(path, continuations)
    by_prompt: dict[int, dict[str, State]] = {}
    for state in states:
        name = digest(state.ids)
        if name not in found:
            by_prompt.setdefault(state.question, {})[name] = state
    waiting = list(by_prompt.values())
    parts = [
        [state for of_prompt in waiting[begin : begin + prompts_at_once] for state in of_prompt.values()]
        for begin in range(0, len(waiting), prompts_at_once)
    ]

    def wanted() -> Iterator[Part]:
        for number, part in enumerate(parts):
            if number and enough():
                return
            yield part

    options = {"continuations": continuations, "seed": seed}
    if elsewhere is None or len(parts) < 2:
        made = (value_part(part, sampler, protocol, **options) for part in wanted())
    else:
        made = elsewhere(wanted(), **options)
    for done, values in enumerate(made, start=1):
        found |= {value.context: value for value in values}
        for value in values if path is not None else ():
            append_json(path, asdict(value))
        say(min(done * prompts_at_once, len(waiting)), len(waiting))
    return found


def value_part(
    part: Part, sampler: TurnSampler, protocol: Protocol, *, continuations: int, seed: int
) -> list[Value]:
    starts = [Start(state, continuations, seed, "value") for state in part]
    rolled = roll(sampler, protocol, starts)
    return [
        Value(digest(state.ids), "".join("1" if t.reward else "0" for t in trajectories))
        for state, trajectories in zip(part, rolled, strict=True)
    ]


def _read(path: Path, continuations: int) -> dict[str, Value]:
    found = {row["context"]: Value(**row) for row in read_json_lines(path)}
    other = {value.continuations for value in found.values()} - {continuations}
    if other:
        raise PreflightError(
            f"{path} has values by {other.pop()} continuations; expected --continuations {continuations}, or a new --dir"
        )
    return found


def score_turns(
    groups: Sequence[Sequence[Trajectory]],
    values: dict[str, Value],
    gains: Sequence[Sequence[Sequence[float]]],
    gold: Sequence[Sequence[Sequence[float]]] | None = None,
    brought: Sequence[Sequence[Sequence[bool]]] | None = None,
) -> list[ScoredTurn]:
    """Every turn of every trajectory; ``groups[prompt][trajectory]``, and ``gains`` the same with a gain per tool turn,
    ``gold`` with the gold answer's probability before each turn (NaN: not known), ``brought`` as `ScoredTurn` has it."""
    scored = []
    for prompt, group in enumerate(groups):
        for number, trajectory in enumerate(group):
            for turn, step in enumerate(trajectory.steps):
                before = values[digest(step.state.ids)]
                after = None if step.next is None else values[digest(step.next.ids)]
                ends = (step.reward,) * 3 if after is None else (after.value, *after.halves)
                star, first, second = (
                    b - a for a, b in zip((before.value, *before.halves), ends, strict=True)
                )
                variance = 0.0 if after is None else after.variance
                scored.append(
                    ScoredTurn(
                        prompt=prompt,
                        trajectory=number,
                        turn=turn,
                        kind="ending" if after is None else "tool",
                        before=before.context,
                        after=None if after is None else after.context,
                        a_star=star,
                        a_first=first,
                        a_second=second,
                        se=(before.variance + variance) ** 0.5,
                        variance_before=before.variance,
                        variance_after=variance,
                        gain=None if after is None else gains[prompt][number][turn],
                        outcome=trajectory.reward,
                        value=before.value,
                        gold_probability=None if gold is None else known(gold[prompt][number][turn]),
                        brought=None if brought is None else brought[prompt][number][turn],
                    )
                )
    return scored


def known(number: float) -> float | None:
    return None if isnan(number) else number


def part_of(values: Mapping[str, Value], part: slice) -> dict[str, Value]:
    """Values by some of the continuations alone."""
    return {name: Value(name, value.outcomes[part]) for name, value in values.items()}


def by_second_half(turns: Sequence[ScoredTurn], values: Mapping[str, Value]) -> list[ScoredTurn]:
    """The same turns with A* and its errors by the second half of the continuations alone."""
    half = next(iter(values.values())).continuations // 2
    variance = {name: value.variance for name, value in part_of(values, slice(half, None)).items()}
    found = []
    for turn in turns:
        before, after = variance[turn.before], 0.0 if turn.after is None else variance[turn.after]
        found.append(
            replace(
                turn,
                a_star=turn.a_second,
                se=(before + after) ** 0.5,
                variance_before=before,
                variance_after=after,
            )
        )
    return found


def true_advantages(groups: Sequence[Sequence[Trajectory]], values: Mapping[str, Value]) -> list[float]:
    """A* of every turn, in the order of `score_turns`."""
    found = []
    for trajectory in (trajectory for group in groups for trajectory in group):
        v = [values[digest(step.state.ids)].value for step in trajectory.steps]
        found += [after - before for before, after in pairwise([*v, trajectory.reward])]
    return found


def states_of(groups: Sequence[Sequence[Trajectory]]) -> list[State]:
    """The distinct contexts before the turns of these trajectories."""
    steps = [step for group in groups for trajectory in group for step in trajectory.steps]
    return list({step.state.ids: step.state for step in steps}.values())
