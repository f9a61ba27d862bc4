"""The numbers of a campaign's folder: areas per condition, declared comparisons with verdicts, the factorial table."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path

from verl_credit.study.campaign.factorial import Factorial, factorial
from verl_credit.study.campaign.file import Campaign
from verl_credit.study.campaign.record import read_record
from verl_credit.study.campaign.state import RunState, State, states
from verl_credit.study.campaign.statistics import (
    Comparison,
    Mean,
    Needed,
    compare,
    holm,
    mean,
    mirrored,
    pairs_needed,
    verdict,
)


@dataclass(frozen=True)
class Judged:
    comparison: Comparison
    needed: Needed
    verdict: str


@dataclass(frozen=True)
class Results:
    folder: Path
    campaign: Campaign
    added: list[dict]
    states: list[RunState]
    means: dict[str, Mean]
    """Condition to the mean of its runs' areas."""
    judged: list[Judged]
    """The declared comparisons."""
    matrix: dict[tuple[str, str], Comparison]
    """(a, b) to a minus b, for every pair of conditions; p_holm where it is declared."""
    factorial: Factorial | None

    @property
    def done(self) -> int:
        return sum(one.state is State.DONE for one in self.states)

    @property
    def hours(self) -> float:
        return sum(one.hours for one in self.states)


def results(folder: Path) -> Results:
    """Errors: FileNotFoundError where no campaign was started, ConfigError for a damaged record."""
    record = read_record(folder)
    campaign, runs = record.campaign, states(record.campaign, folder)
    values = {name: {} for name in campaign.conditions}
    for one in runs:
        if one.value is not None:
            values[one.run.condition][one.run.block] = one.value
    family = campaign.pairs()
    compared = holm([compare(a, b, values[a], values[b]) for a, b in family])
    judged = [
        Judged(
            c,
            pairs_needed(c, len(family)),
            verdict(c, len(family), campaign.metric.higher_is_better, *_absent(runs, c.a, c.b)),
        )
        for c in compared
    ]
    table = factorial(campaign.levels(), values) if campaign.factors else None
    means = {name: mean(list(of.values())) for name, of in values.items()}
    return Results(
        folder, campaign, record.added, runs, means, judged, _matrix(campaign, values, compared), table
    )


def _absent(runs: list[RunState], a: str, b: str) -> tuple[int, int]:
    """(pairs that are still to come, pairs that never come: a run of them failed, or has no number)"""
    pending: set[tuple] = set()
    never: set[tuple] = set()
    for one in runs:
        if one.run.condition in (a, b) and one.value is None:
            over = one.state in (State.FAILED, State.DAMAGED, State.DONE)
            (never if over else pending).add(one.run.block)
    return len(pending - never), len(never)


def _matrix(
    campaign: Campaign, values: dict[str, dict], compared: list[Comparison]
) -> dict[tuple[str, str], Comparison]:
    matrix = {(c.a, c.b): c for c in compared}
    for a, b in itertools.combinations(campaign.conditions, 2):
        one = matrix.get((b, a)) or matrix.get((a, b)) or compare(b, a, values[b], values[a])
        matrix[one.a, one.b], matrix[one.b, one.a] = one, mirrored(one)
    return matrix
