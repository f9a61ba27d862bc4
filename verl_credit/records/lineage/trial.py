"""A trial: one row of the table, with the columns of the public format."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from enum import StrEnum


class FailureLabel(StrEnum):
    """How a trial ended; the column ``status``."""

    KEEP = "keep"
    DISCARD = "discard"
    CRASH = "crash"
    EVAL_BUDGET_OVERRUN = "eval_budget_overrun"
    TRAIN_BUDGET_OVERRUN = "train_budget_overrun"
    SIZE_BLOCKED = "size_blocked"
    PREFLIGHT_CRASH = "preflight_crash"
    HARNESS_ABORT = "harness_abort"
    DISQUALIFIED = "disqualified"
    BASELINE = "baseline"

    @property
    def is_informational(self) -> bool:
        """The trial is evidence about its hypothesis: true for all but ``harness_abort``, which was stopped from outside."""
        return self is not FailureLabel.HARNESS_ABORT

    @property
    def is_kept(self) -> bool:
        """Later trials are measured against it: ``keep`` and ``baseline``."""
        return self in (FailureLabel.KEEP, FailureLabel.BASELINE)


@dataclass(frozen=True)
class Trial:
    """The 17 columns in the order of the file; None is an empty cell.

    ``exp_id`` is bare ("004"); pages write ``exp_004``. ``delta_vs_best`` is ``core_metric`` minus the metric of the best
    earlier kept trial, in both directions. ``train_s`` and ``total_s`` are seconds. ``snapshot_path`` names the file
    or folder that ``RecipeEdit`` compares.
    """

    exp_id: str
    timestamp: str
    specialist: str
    parent_exp: str
    baseline_exp: str
    domain: str
    hypothesis: str
    expected_delta: str
    status: FailureLabel
    core_metric: float | None
    val_bpb: float | None
    delta_vs_best: float | None
    train_s: float | None
    total_s: float | None
    job_name: str
    snapshot_path: str
    notes: str

    @property
    def label(self) -> str:
        """The id as pages write it; files of other tools may already have the prefix."""
        return "exp_" + self.exp_id.removeprefix("exp_")

    def cells(self) -> list[str]:
        values = (getattr(self, name) for name in COLUMNS)
        return ["" if value is None else str(value) for value in values]

    @classmethod
    def from_cells(cls, cells: Sequence[str]) -> Trial:
        """Raises ValueError that names the first cell which cannot be read. No status means ``discard``."""
        row = dict(zip(COLUMNS, cells, strict=True))
        if not row["exp_id"].strip():
            raise ValueError("exp_id is empty")
        row["status"] = _status(row["status"] or FailureLabel.DISCARD)
        return cls(**row | {name: number(name, row[name]) for name in NUMBERS})


COLUMNS = tuple(field.name for field in fields(Trial))
NUMBERS = ("core_metric", "val_bpb", "delta_vs_best", "train_s", "total_s")


def _status(text: str) -> FailureLabel:
    try:
        return FailureLabel(text)
    except ValueError:
        raise ValueError(f"status={text!r}; accepted are {', '.join(FailureLabel)}") from None


def number(name: str, value: object) -> float | None:
    """A finite number, None for an empty cell. Raises ValueError naming the column for everything else."""
    if value is None or value == "":
        return None
    try:
        parsed = float(value)
    except (TypeError, ValueError):
        raise ValueError(f"{name}={value!r}; expected a number or nothing") from None
    if not math.isfinite(parsed):
        raise ValueError(f"{name}={value!r}; expected a finite number or nothing")
    return parsed
