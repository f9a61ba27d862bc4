"""The true value of every distinct context.

V(s)  = P(the final answer is right | s, policy at temperature 1), by M continuations to the end
"""

from __future__ import annotations

import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from verl_credit.errors import PreflightError
from verl_credit.records.run.files import append_json, read_json_lines
from verl_credit.worlds.rollouts.protocol import State
from verl_credit.worlds.rollouts.rollout import Groups, Roll, Start
from verl_credit.worlds.rollouts.sampler import digest

VALUES = "values.jsonl"
PROMPTS_AT_ONCE = 4
Part = list[State]
"""Contexts that are valued together."""


@dataclass(frozen=True)
class Value:
    """``outcomes``: 1 for a continuation that ended right, else 0, in the order of the draws.
    ``otherwise``: in how many a tool answered otherwise on the way to the context."""

    context: str
    outcomes: str
    otherwise: int = 0

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
        """V by each half; the two are independent estimates."""
        half = self.continuations // 2
        first, second = (self.outcomes[part].count("1") for part in (slice(half), slice(half, None)))
        return first / half, second / (self.continuations - half)

    @property
    def variance(self) -> float:
        """The estimate's variance p (1 - p) / M with p = (successes + 1/2) / (M + 1), so that 0 of M is not certain."""
        p = (self.successes + 0.5) / (self.continuations + 1)
        return p * (1 - p) / self.continuations


class Elsewhere(typing.Protocol):
    """Values of parts by other processes (`workers`), in any order."""

    def __call__(self, parts: Iterable[Part], *, continuations: int, seed: int) -> Iterator[list[Value]]: ...


def values_of(
    states: Iterable[State],
    roll: Roll,
    *,
    continuations: int,
    seed: int,
    path: Path | None = None,
    prompts_at_once: int = PROMPTS_AT_ONCE,
    say: Callable[[int, int], None] = lambda done, of: None,
    enough: Callable[[], bool] = lambda: False,
    elsewhere: Elsewhere | None = None,
) -> dict[str, Value]:
    """V of every distinct context, by its digest. Values in ``path`` are reused, new values are appended to it as they
    come, so that a repeated call continues. A value depends only on the seed and the context.

    Prompts are valued in their order, ``prompts_at_once`` together, in this process or ``elsewhere``; before each such part
    but the first ``enough`` can end it.

    Raises PreflightError when ``path`` has values by another number of continuations.
    """
    check_continuations(continuations)
    value_of = {} if path is None else _read(path, continuations)
    by_prompt: dict[int, dict[str, State]] = {}
    for state in states:
        name = digest(state.ids)
        if name not in value_of:
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
        batches = (value_part(part, roll, **options) for part in wanted())
    else:
        batches = elsewhere(wanted(), **options)
    for done, values in enumerate(batches, start=1):
        value_of |= {value.context: value for value in values}
        for value in values if path is not None else ():
            append_json(path, asdict(value))
        say(min(done * prompts_at_once, len(waiting)), len(waiting))
    return value_of


def check_continuations(continuations: int) -> None:
    if continuations < 2 or continuations % 2:
        raise PreflightError(f"--continuations {continuations}: expected an even number of at least 2")


def value_part(part: Part, roll: Roll, *, continuations: int, seed: int) -> list[Value]:
    starts = [Start(state, continuations, seed, "value") for state in part]
    rolled = roll(starts)
    return [
        Value(
            digest(state.ids),
            "".join("1" if t.reward else "0" for t in trajectories),
            sum(t.otherwise for t in trajectories),
        )
        for state, trajectories in zip(part, rolled, strict=True)
    ]


def _read(path: Path, continuations: int) -> dict[str, Value]:
    value_of = {row["context"]: Value(**row) for row in read_json_lines(path)}
    other = {value.continuations for value in value_of.values()} - {continuations}
    if other:
        raise PreflightError(
            f"{path} has values by {other.pop()} continuations; expected --continuations {continuations}, or a new --dir"
        )
    return value_of


def part_of(values: Mapping[str, Value], part: slice) -> dict[str, Value]:
    """The values by some of the continuations."""
    return {name: Value(name, value.outcomes[part]) for name, value in values.items()}


def states_of(groups: Groups) -> list[State]:
    """The distinct contexts before the turns of these trajectories."""
    steps = [step for group in groups for trajectory in group for step in trajectory.steps]
    return list({step.state.ids: step.state for step in steps}.values())
