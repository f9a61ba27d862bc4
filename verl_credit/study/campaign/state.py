"""The state of a run by its folder: how far it is, how long it took, and its number for the campaign."""

from __future__ import annotations

import json
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import numpy as np
import psutil

from verl_credit.errors import did_you_mean
from verl_credit.records.report.run_data import Series, number, series
from verl_credit.records.run.events import END, START, Reason
from verl_credit.records.run.files import EVENTS, METRICS, VALIDATION, DamagedFile, read_json_lines
from verl_credit.records.run.lock import LOCK
from verl_credit.records.run.table_files import TABLES
from verl_credit.study.campaign.design import PlannedRun, planned
from verl_credit.study.campaign.file import Campaign, Metric


class State(StrEnum):
    WAITING = "not started"
    RUNNING = "running"
    UNFINISHED = "unfinished"  # killed, interrupted, or at its time limit: it continues from its checkpoint
    FAILED = "failed"  # tried again by the next `campaign run`
    DAMAGED = "damaged"  # a file cannot be read; the run is not started again
    DONE = "done"


_DONE = (Reason.DONE, Reason.NOTHING_LEFT)
_FAILED = (Reason.FAILED, Reason.EVALUATION_OVERRUN, Reason.FAULT, Reason.REFUSED)
_STATES = dict.fromkeys(_DONE, State.DONE) | dict.fromkeys(_FAILED, State.FAILED)


@dataclass(frozen=True)
class RunState:
    run: PlannedRun
    folder: Path
    state: State
    why: str
    """The run's own message about the end of its last start."""
    hours: float
    curve: Series
    value: float | None
    """The area under the curve, of a run that is done."""
    why_no_value: str


def states(campaign: Campaign, folder: Path) -> list[RunState]:
    """The states of all declared runs, in the order in which they start."""
    return [state_of(run, folder / run.folder, campaign.metric) for run in planned(campaign)]


def state_of(run: PlannedRun, folder: Path, metric: Metric) -> RunState:
    try:
        events = read_json_lines(folder / EVENTS)
        curve, why_no_curve = _curve(folder, metric)
    except (DamagedFile, OSError) as error:
        return RunState(run, folder, State.DAMAGED, str(error), 0.0, Series(), None, str(error))
    state, why = _state(events, folder)
    value, why_no_value = None, why or str(state)
    if state is State.DONE:
        try:
            value, why_no_value = area(curve.steps, curve.values, *metric.window), ""
        except ValueError as error:
            why_no_value = why_no_curve or str(error)
    return RunState(run, folder, state, why, _hours(events, folder), curve, value, why_no_value)


def _state(events: list[dict], folder: Path) -> tuple[State, str]:
    marks = [row for row in events if row.get("kind") in (START, END)]
    if not marks:
        return State.WAITING, ""
    ends = [
        (_STATES.get(str(row.get("reason")), State.UNFINISHED), str(row.get("text", "")))
        for row in marks
        if row["kind"] == END
    ]
    for state, text in ends:
        if state is State.DONE:  # for good: a later start changes nothing
            return state, text
    if marks[-1]["kind"] == START:
        return (State.RUNNING, "") if running(folder) else (State.UNFINISHED, "killed")
    return ends[-1]


def running(folder: Path) -> bool:
    """Is the process that wrote the run's lock still there? A later process with the same number is a different process."""
    path = folder / LOCK
    try:
        holder = json.loads(path.read_text())
        started = psutil.Process(holder["pid"]).create_time()
        return holder["host"] == socket.gethostname() and started <= path.stat().st_mtime
    except (OSError, ValueError, KeyError, TypeError, psutil.Error):
        return False


def _hours(events: list[dict], folder: Path) -> float:
    """The hours of all starts together. A killed start ended when it wrote its last file, as far as is known."""
    seconds, begin, last = 0.0, None, 0.0
    for row in events:
        time = number(row.get("time"))
        if time is None:
            continue
        if row.get("kind") == START:
            begin = last = time
        elif begin is not None and row.get("kind") == END:
            seconds += max(0.0, (last if row.get("reason") == Reason.KILLED else time) - begin)
            begin = None
        else:
            last = time
    if begin is not None:
        written = [p.stat().st_mtime for n in (METRICS, VALIDATION, TABLES) if (p := folder / n).exists()]
        seconds += max(0.0, max([last, *written]) - begin)
    return seconds / 3600


def _curve(folder: Path, metric: Metric) -> tuple[Series, str]:
    """The metric over steps; of a step that was written twice the last line is used. And the reason when it is empty."""
    file = VALIDATION if metric.held_out else METRICS
    rows = {row["step"]: row for row in read_json_lines(folder / file) if type(row.get("step")) is int}
    curve = series([rows[step] for step in sorted(rows)], metric.name)
    names = sorted({name for row in rows.values() for name in row} - {"step"})
    if curve or not names:
        return curve, "" if curve else f"{file} is missing or empty"
    return curve, f"{file} has no {metric.name}{did_you_mean(metric.name, names)}"


def area(steps: Sequence[int], values: Sequence[float], first: int, last: int) -> float:
    """The mean height of the curve between the steps ``first`` and ``last``.

        area = 1 / (last - first) * integral from first to last of the line through (step, value)

    Trapezoids; where the window ends between two steps, the curve is interpolated. A constant curve gives its constant.
    ``steps`` increase, and ``first`` is below ``last``. Raises ValueError for a curve that does not cover the window,
    because nothing is extrapolated.
    """
    if not len(steps):
        raise ValueError("no values")
    if steps[0] > first or steps[-1] < last:
        there = f"values from step {steps[0]} to {steps[-1]}"
        raise ValueError(f"{there} do not cover the window {first} to {last}")
    if steps[-1] > 1 << 53:
        raise ValueError("a step above 2**53, which no run has made")
    ends = np.interp([first, last], steps, values)
    inside = [(s, v) for s, v in zip(steps, values, strict=True) if first < s < last]
    x = [first, *(s for s, _ in inside), last]
    y = [ends[0], *(v for _, v in inside), ends[1]]
    return float(np.trapezoid(y, x) / (last - first))
