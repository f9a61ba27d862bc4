"""A trial: one row of the table, with the columns of the public format; its changes against its parent; and the rules of a
lineage: the best trial, the kept trials, the chain to a trial, and whether a finished trial is kept."""

from __future__ import annotations

import difflib
import io
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple


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
        try:
            row["status"] = FailureLabel(row["status"] or FailureLabel.DISCARD)
        except ValueError:
            accepted = ", ".join(FailureLabel)
            raise ValueError(f"status={row['status']!r}; accepted are {accepted}") from None
        return cls(**row | {name: number(name, row[name]) for name in NUMBERS})


COLUMNS = tuple(field.name for field in fields(Trial))
NUMBERS = ("core_metric", "val_bpb", "delta_vs_best", "train_s", "total_s")


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


def best_of(trials: Iterable[Trial], *, lower_is_better: bool) -> Trial | None:
    """The best metric among ``keep`` and ``baseline``, the first of equals; None where none of them has a metric."""
    kept = [trial for trial in trials if trial.status.is_kept and trial.core_metric is not None]
    pick = min if lower_is_better else max
    return pick(kept, key=lambda trial: trial.core_metric, default=None)


def keeps_of(trials: Iterable[Trial], *, lower_is_better: bool) -> tuple[Trial, ...]:
    """Returns the trials with status ``keep``, best first; trials without a metric come last in both directions."""
    sign = 1 if lower_is_better else -1
    kept = [trial for trial in trials if trial.status is FailureLabel.KEEP]
    return tuple(sorted(kept, key=lambda t: (t.core_metric is None, sign * (t.core_metric or 0.0))))


def last(trials: Sequence[Trial], n: int) -> tuple[Trial, ...]:
    return tuple(trials[-n:]) if n > 0 else ()


def chain(trials: Iterable[Trial], exp_id: str) -> tuple[Trial, ...]:
    """Returns the trials from the root to ``exp_id`` along ``parent_exp``, with any status.

    The walk to the root ends at a missing parent and at a circle. Among rows with one id the last is used. Raises KeyError
    when ``exp_id`` has no row.
    """
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
    """``keep`` where the gain over the best kept trial exceeds ``threshold``, else ``discard``.

        gain = metric − best, its sign turned where lower is better

    The first trial with a metric is the ``baseline``: there is nothing to compare it with. One without a metric is
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


NOWHERE = "/dev/null"


@dataclass(frozen=True)
class RecipeEdit:
    """``snapshot_path`` and ``parent_snapshot_path``: two files or two folders; no parent for a baseline."""

    trial: Trial
    snapshot_path: str | Path
    parent_snapshot_path: str | Path | None

    def diff(self) -> str:
        """A unified diff of every file that differs, by name: changed, new, and deleted ones; "" for a baseline.

            --- a/x          --- /dev/null: x is new
            +++ b/x          +++ /dev/null: x was deleted

        Files that are no UTF-8 text get a line that they differ. Links are not followed. The released diff leaves
        deleted files out. Raises FileNotFoundError for a missing snapshot.
        """
        if not self.parent_snapshot_path:
            return ""
        before, after = _files(Path(self.parent_snapshot_path)), _files(Path(self.snapshot_path))
        if before.keys() == {""} and after.keys() == {""}:
            name = Path(self.snapshot_path).name
            before, after = {name: before[""]}, {name: after[""]}
        diffs = (_diff(name, before.get(name), after.get(name)) for name in sorted({*before, *after}))
        return "".join(diffs)


def _files(root: Path) -> dict[str, Path]:
    """Returns the files by their names below ``root``; the name is "" when the root is a file."""
    if root.is_file():
        return {"": root}
    if not root.is_dir():
        raise FileNotFoundError(f"snapshot {root} is not there")
    paths = (path for path in root.rglob("*") if path.is_file() and not path.is_symlink())
    return {path.relative_to(root).as_posix(): path for path in paths}


def _diff(name: str, before: Path | None, after: Path | None) -> str:
    old, new = (path.read_bytes() if path else b"" for path in (before, after))
    if old == new and before and after:
        return ""
    a, b = f"a/{name}" if before else NOWHERE, f"b/{name}" if after else NOWHERE
    try:
        if b"\0" in old + new:
            raise ValueError
        left, right = (content.decode() for content in (old, new))
    except ValueError:  # UnicodeDecodeError is a ValueError
        return f"Binary files {a} and {b} differ\n"
    # The parts end at line feeds only: ``splitlines`` also splits at eleven other characters.
    lines = list(difflib.unified_diff(*(list(io.StringIO(text, "\n")) for text in (left, right)), a, b))
    lines = lines or [f"--- {a}\n", f"+++ {b}\n"]  # an empty file that is new or gone
    return "".join(one if one.endswith("\n") else one + "\n\\ No newline at end of file\n" for one in lines)
