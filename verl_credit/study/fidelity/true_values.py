"""The true value of every distinct context, and the true advantage of every turn from the values around it.

    V(s)  = P(the final answer is right | s, policy at temperature 1), by M continuations to the end
    A*_k  = V(s_{k+1}) - V(s_k)   for a tool turn: s_{k+1} has its tool's answer
    A*_n  = r - V(s_n)            for the turn that ends the trajectory

The lab's retrieval is deterministic, so a turn's state after its tool follows from the turn alone.
`martingale` has the check: statistics of A* that are 0 on average.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain, pairwise, takewhile
from math import isnan
from pathlib import Path

from verl_credit.errors import PreflightError
from verl_credit.records.run.files import append_json, read_json_lines
from verl_credit.worlds.rollouts.protocol import State, Step
from verl_credit.worlds.rollouts.rollout import Groups, Roll, Start
from verl_credit.worlds.rollouts.sampler import digest

VALUES, TURNS = "values.jsonl", "turns.jsonl"
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


def value_part(
    part: Sequence[State], roll: Roll, *, continuations: int, seed: int, name: str = "value"
) -> list[Value]:
    values = []
    rolled = roll([Start(state, continuations, seed, name) for state in part])
    for state, paths in zip(part, rolled, strict=True):
        outcomes = "".join("1" if path.reward else "0" for path in paths)
        values.append(Value(digest(state.ids), outcomes, sum(path.otherwise for path in paths)))
    return values


def _read(path: Path, continuations: int) -> dict[str, Value]:
    value_of = {row["context"]: Value(**row) for row in read_json_lines(path)}
    other = {value.continuations for value in value_of.values()} - {continuations}
    if other:
        use = f"expected --continuations {continuations}, or a new --dir"
        raise PreflightError(f"{path} has values by {other.pop()} continuations; {use}")
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


@dataclass(frozen=True)
class ScoredTurn:
    """A turn of a sampled trajectory with its true advantage; ``after`` is None for the turn that ends."""

    prompt: int
    trajectory: int
    """The trajectory's number within the prompt."""
    turn: int
    kind: str
    """``tool`` or ``ending``."""
    before: str
    after: str | None
    a_star: float
    a_first: float
    a_second: float
    """``a_first`` and ``a_second`` are A* by each half of the continuations."""
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
    """The gold answer's probability before the turn, by that scorer."""
    brought: bool | None = None
    """The turn is the first of its trajectory to bring a needed article; None where the data set names none."""


def score_turns(
    groups: Groups,
    values: dict[str, Value],
    gain_N: Sequence[float] | None = None,
    gold_N: Sequence[float] | None = None,
    brought_N: Sequence[bool] | None = None,
) -> list[ScoredTurn]:
    """Every turn of every trajectory, in the order of `turns_of`, which the further numbers have, too: gains (an ending
    turn's is not read), the gold answer's probability before each turn (NaN: not known), ``brought`` of `ScoredTurn`."""
    scored = []
    for n, (prompt, number, turn, step) in enumerate(turns_of(groups)):
        before = values[digest(step.state.ids)]
        after = None if step.next is None else values[digest(step.next.ids)]
        ends = (step.reward,) * 3 if after is None else (after.value, *after.halves)
        star, first, second = (b - a for a, b in zip((before.value, *before.halves), ends, strict=True))
        variance = 0.0 if after is None else after.variance
        p = None if gold_N is None else float(gold_N[n])
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
                gain=None if after is None or gain_N is None else float(gain_N[n]),
                outcome=groups[prompt][number].reward,
                value=before.value,
                gold_probability=None if p is None or isnan(p) else p,
                brought=None if brought_N is None else brought_N[n],
            )
        )
    return scored


def by_second_half(turns: Sequence[ScoredTurn], values: Mapping[str, Value]) -> list[ScoredTurn]:
    """Returns the turns with A* and its errors by the second half of the continuations."""
    half = next(iter(values.values())).continuations // 2
    variance = {name: value.variance for name, value in part_of(values, slice(half, None)).items()}
    rescored = []
    for turn in turns:
        before, after = variance[turn.before], 0.0 if turn.after is None else variance[turn.after]
        star = {"a_star": turn.a_second, "se": (before + after) ** 0.5}
        rescored.append(replace(turn, **star, variance_before=before, variance_after=after))
    return rescored


def true_advantages(groups: Groups, values: Mapping[str, Value]) -> list[float]:
    """A* of every turn, in the order of `score_turns`."""
    a_star = []
    for trajectory in chain(*groups):
        v = [values[digest(step.state.ids)].value for step in trajectory.steps]
        a_star += [after - before for before, after in pairwise([*v, trajectory.reward])]
    return a_star


@dataclass(frozen=True)
class ZScore:
    """The z score of a mean whose expectation is 0; None where fewer than two prompts differ."""

    name: str
    mean: float
    z: float | None
    n: int


def martingale(turns: Sequence[ScoredTurn]) -> list[ZScore]:
    """Mean A* by turn number, and mean r - V(s_0): V is a martingale, so both are 0.

    The means are over all turns of a number, ending turns (r - V) included: over tool turns only the mean is not 0, because
    the policy chooses which turns are tool turns. Standard errors are over prompts, whose turns share values.
    """
    scores = [
        _z(f"turn {number + 1}", [(turn.prompt, turn.a_star) for turn in turns if turn.turn == number])
        for number in sorted({turn.turn for turn in turns})
    ]
    whole: Counter[tuple[int, int]] = Counter()
    for turn in turns:
        whole[turn.prompt, turn.trajectory] += turn.a_star
    return [*scores, _z("r - V(s_0)", [(prompt, total) for (prompt, _), total in whole.items()])]


def _z(name: str, values: Sequence[tuple[int, float]]) -> ZScore:
    """The prompts' sums are independent, with mean 0 each:  z = sum_p S_p / sqrt(sum_p S_p^2)."""
    sums: Counter[int] = Counter()
    for prompt, value in values:
        sums[prompt] += value
    total, square = sum(sums.values()), sum(s * s for s in sums.values())
    z = total / square**0.5 if square > 0 and len(sums) > 1 else None
    return ZScore(name, total / len(values), z, len(values))
