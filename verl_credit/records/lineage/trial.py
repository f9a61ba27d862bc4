"""A trial, with the columns of the public format; and which trials are best, kept, and led to another."""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from enum import StrEnum
from typing import NamedTuple

from verl_credit.names import bare_id


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


@dataclass(frozen=True)
class Trial:
    """The 17 columns in the order of the file; None is an empty cell.

    ``exp_id`` is bare ("004"); pages write ``exp_004``. ``delta_vs_best`` is ``core_metric`` minus the metric of the best
    earlier kept trial, in both directions. ``train_s`` and ``total_s`` are seconds.
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

    def row(self) -> str:
        """Returns the line of the table, without its end. Raises ValueError for an id that a row cannot have."""
        bare_id(self.exp_id)
        text = io.StringIO()
        end = "\r\n"  # csv quotes cells with the characters of a line's end
        values = (_inert(getattr(self, name)) for name in COLUMNS)
        csv.writer(text, delimiter="\t", lineterminator=end).writerow(values)
        return text.getvalue().removesuffix(end)

    @classmethod
    def of(cls, cells: Sequence[str]) -> Trial:
        """Raises ValueError that names the first cell which cannot be read. No status means ``discard``."""
        if len(cells) != len(COLUMNS):
            raise ValueError(f"{len(cells)} cells; expected {len(COLUMNS)}")
        row = {name: _without_quote(cell) for name, cell in zip(COLUMNS, cells, strict=True)}
        if not row["exp_id"].strip():
            raise ValueError("exp_id is empty")
        try:
            row["status"] = FailureLabel(row["status"] or FailureLabel.DISCARD)
        except ValueError:
            raise ValueError(f"status={row['status']!r}; accepted are {', '.join(FailureLabel)}") from None
        return cls(**row | {name: _number(name, row[name]) for name in NUMBERS})


COLUMNS = tuple(field.name for field in fields(Trial))
NUMBERS = ("core_metric", "val_bpb", "delta_vs_best", "train_s", "total_s")


_FORMULA = re.compile(r"['\s]*[=+@-]")
"""What a spreadsheet would take for the beginning of a formula."""


def _inert(value: object) -> object:
    """A text that a spreadsheet would compute gets a quote before it, which spreadsheets do not show; a number has none."""
    if not isinstance(value, str) or not _FORMULA.match(value) or _PLAIN.fullmatch(value):
        return value
    return f"'{value}"


_PLAIN = re.compile(r"[+-]?[\d.]+(e[+-]?\d+)?")


def _without_quote(cell: str) -> str:
    return cell[1:] if cell.startswith("'") and _FORMULA.match(cell[1:]) else cell


def _number(name: str, text: str) -> float | None:
    try:
        parsed = float(text) if text else None
    except ValueError:
        parsed = math.nan
    if parsed is not None and not math.isfinite(parsed):
        raise ValueError(f"{name}={text!r}; expected a finite number or nothing")
    return parsed


def best_of(trials: Iterable[Trial], *, lower_is_better: bool) -> Trial | None:
    """Returns the best metric among ``keep`` and ``baseline``, the first of equals; None where none of them has one."""
    later_compare_with = (FailureLabel.KEEP, FailureLabel.BASELINE)
    kept = [t for t in trials if t.status in later_compare_with and t.core_metric is not None]
    pick = min if lower_is_better else max
    return pick(kept, key=lambda trial: trial.core_metric, default=None)


def keeps_of(trials: Iterable[Trial], *, lower_is_better: bool) -> tuple[Trial, ...]:
    """Returns the trials with status ``keep``, best first; trials without a metric come last in both directions."""
    sign = 1 if lower_is_better else -1
    kept = [trial for trial in trials if trial.status is FailureLabel.KEEP]
    return tuple(sorted(kept, key=lambda t: (t.core_metric is None, sign * (t.core_metric or 0.0))))


def chain(trials: Iterable[Trial], exp_id: str) -> tuple[Trial, ...]:
    """Returns the trials from the root to ``exp_id`` along ``parent_exp``, with any status. The walk to the root ends at a
    missing parent and at a circle. Among rows with one id the last is used."""
    by_id = {trial.exp_id: trial for trial in trials}
    chained = {exp_id: by_id[exp_id]}
    parent = by_id[exp_id].parent_exp
    while parent in by_id and parent not in chained:
        chained[parent] = by_id[parent]
        parent = by_id[parent].parent_exp
    return tuple(reversed(chained.values()))


class Verdict(NamedTuple):
    status: FailureLabel
    delta_vs_best: float | None
    why: str


def verdict(
    metric: float | None, trials: Iterable[Trial], *, threshold: float, lower_is_better: bool
) -> Verdict:
    """Returns ``keep`` where the gain over the best kept trial exceeds ``threshold``, else ``discard``.

        gain = metric − best, its sign turned where lower is better

    The first trial with a metric is the ``baseline``: there is nothing to compare it with. A trial without a metric is
    discarded. A gain of the threshold itself, within 1e-12, does not exceed it.
    """
    if metric is None:
        return Verdict(FailureLabel.DISCARD, None, "no held-out metric")
    best = best_of(trials, lower_is_better=lower_is_better)
    if best is None:
        return Verdict(FailureLabel.BASELINE, None, "the first trial with a metric")
    delta = metric - best.core_metric
    gain = -delta if lower_is_better else delta
    kept = gain > threshold and not math.isclose(gain, threshold, abs_tol=1e-12)
    reason = f"gain {gain:+.6g} over {best.label}, {'above' if kept else 'not above'} {threshold:g}"
    return Verdict(FailureLabel.KEEP if kept else FailureLabel.DISCARD, delta, reason)
