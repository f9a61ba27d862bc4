"""The true value of every distinct context.

V(s)  = P(the final answer is right | s, policy at temperature 1), by M continuations to the end
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import chain, takewhile
from pathlib import Path

from verl_credit.errors import PreflightError
from verl_credit.records.run.files import append_json, read_json_lines
from verl_credit.worlds.rollouts.protocol import State, Step
from verl_credit.worlds.rollouts.rollout import Groups, Roll, Start
from verl_credit.worlds.rollouts.sampler import digest

VALUES = "values.jsonl"
PROMPTS_AT_ONCE = 4


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
    elsewhere: Callable[..., Iterable[list[Value]]] | None = None,
) -> dict[str, Value]:
    """V of every distinct context, by its digest. Values in ``path`` are reused, new values are appended to it as they
    come, so that a repeated call continues. A value depends only on the seed and the context.

    Prompts are valued in their order, ``prompts_at_once`` together, in this process or ``elsewhere`` (`Workers.values`);
    before each such part but the first ``enough`` can end it.

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
    wanted = chain(parts[:1], takewhile(lambda part: not enough(), parts[1:]))
    options = {"continuations": continuations, "seed": seed}
    if elsewhere is None or len(parts) < 2:
        batches = (value_part(part, roll, **options) for part in wanted)
    else:
        batches = elsewhere(wanted, **options)
    for done, values in enumerate(batches, start=1):
        value_of |= {value.context: value for value in values}
        for value in values if path is not None else ():
            append_json(path, asdict(value))
        say(min(done * prompts_at_once, len(waiting)), len(waiting))
    return value_of


def check_continuations(continuations: int) -> None:
    if continuations < 2 or continuations % 2:
        raise PreflightError(f"--continuations {continuations}: expected an even number of at least 2")


def value_part(part: Sequence[State], roll: Roll, *, continuations: int, seed: int) -> list[Value]:
    values = []
    rolled = roll([Start(state, continuations, seed, "value") for state in part])
    for state, paths in zip(part, rolled, strict=True):
        outcomes = "".join("1" if path.reward else "0" for path in paths)
        values.append(Value(digest(state.ids), outcomes, sum(path.otherwise for path in paths)))
    return values


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
    return list({step.state.ids: step.state for *_, step in turns_of(groups)}.values())


def turns_of(groups: Groups) -> Iterator[tuple[int, int, int, Step]]:
    """(prompt, number of the trajectory, number of the turn, turn) of every turn, in order."""
    for prompt, group in enumerate(groups):
        for number, trajectory in enumerate(group):
            for turn, step in enumerate(trajectory.steps):
                yield prompt, number, turn, step
