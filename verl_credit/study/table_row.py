"""A row of the table of credits: one credit at an equal number of rollouts, and what a folder has measured of it.

A column's number is paired with GRPO's by seed: a pair has the same first policy, tasks and order of tasks.
"""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.stats import t as student_t

from verl_credit.errors import PreflightError
from verl_credit.records.run.files import DamagedFile, append_json, read_json_lines
from verl_credit.study.bench import Candidate, find_candidate
from verl_credit.study.exact_worlds.fed_credit import FedCredit
from verl_credit.study.exact_worlds.learning import ROLLOUTS, UPDATES

GROUP = 8
"""The rollouts of a question in a step, unless a row says otherwise. GRPO's row has so many."""


@dataclass(frozen=True)
class Row:
    """A credit, and how many rollouts a question has. ``values`` is a provider of `exact_worlds.fed_credit`."""

    candidate: Candidate
    values: str | None = None
    group: int = GROUP

    def __post_init__(self) -> None:
        if self.group < 2 or ROLLOUTS % (self.group * UPDATES):
            accepted = [n for n in range(2, ROLLOUTS) if ROLLOUTS % (n * UPDATES) == 0]
            raise PreflightError(f"--n {self.group}: expected one of {', '.join(map(str, accepted))}")
        self.credit()  # refuses values that nothing reads

    @property
    def name(self) -> str:
        given = [f"{name} {value}" for name, value in self.candidate.params.items()]
        values = [] if self.values is None else [f"values {self.values}"]
        return ", ".join(
            [self.candidate.path, *values, *given, *([] if self.group == GROUP else [f"n {self.group}"])]
        )

    def credit(self) -> FedCredit:
        """The credit without a replay."""
        return FedCredit(self.candidate.mode, self.candidate.params, self.values)

    def overrides(self) -> list[str]:
        """Overrides of a recipe whose run has this credit."""
        values = self.credit().values
        of_values = [] if values is None else [f"algorithm.turn_values={values}"]
        return [*self.candidate.overrides(), *of_values]


def row_of(
    mode: str, params: Mapping[str, Any] | None = None, values: str | None = None, group: int = GROUP
) -> Row:
    """Raises PreflightError as `find_candidate` and `FedCredit` do, and for a group that does not divide a step."""
    return Row(find_candidate(mode, params), values, group)


ROWS = "rows.jsonl"
"""The file of a folder: a line for each row and column, which is only appended to. The last line of a column counts."""


@dataclass
class Measured:
    """What was measured of a row, by column. Each column's numbers stand beside the settings that made them."""

    path: Path
    row: str
    columns: dict[str, dict] = field(default_factory=dict)

    @classmethod
    def of(cls, row: Row, folder: Path) -> Measured:
        """What the folder has of the row."""
        return cls.all(folder).get(row.name) or cls(folder / ROWS, row.name)

    @classmethod
    def all(cls, folder: Path) -> dict[str, Measured]:
        """What the folder has, by the rows' names. Raises DamagedFile, which names the line."""
        found: dict[str, Measured] = {}
        for number, line in enumerate(read_json_lines(folder / ROWS), 1):
            try:
                name, column = line.pop("row"), line.pop("column")
            except KeyError as error:
                raise DamagedFile(
                    f"{folder / ROWS}, line {number}: no {error}; expected row and column"
                ) from None
            found.setdefault(name, cls(folder / ROWS, name)).columns[column] = line
        return found

    def add(self, column: str, measured: dict) -> None:
        """Appends a line to the file."""
        self.columns[column] = measured | {"machine": _machine()}
        append_json(self.path, {"row": self.row, "column": column, **self.columns[column]})


@dataclass(frozen=True)
class Difference:
    """The mean over pairs, and half of Student's 95 % interval."""

    mean: float
    half: float

    @property
    def wins(self) -> bool:
        """The interval is above 0."""
        return self.mean - self.half > 0

    def __str__(self) -> str:
        return f"{self.mean:+.1f} ± {self.half:.1f}"


def difference(one: Sequence[float], other: Sequence[float]) -> Difference:
    """Of paired numbers, at least two."""
    apart = np.subtract(one, other)
    n = len(apart)
    return Difference(float(apart.mean()), float(student_t.ppf(0.975, n - 1) * apart.std(ddof=1) / n**0.5))


def _machine() -> str:
    return f"{platform.machine()}, Python {platform.python_version()}, torch {torch.__version__}, one thread"
