"""Notes of a run that a person must see (banner, resume, how it ended), in a file that the progress display reads."""

from __future__ import annotations

import time
from enum import StrEnum
from pathlib import Path

from verl_credit.errors import ExitCode
from verl_credit.records.run.files import EVENTS, METRICS, DamagedFile, append_json, read_json_lines
from verl_credit.redact import redact

START, END, MAX_HOURS, EVALUATION_OVERRUN = "start", "end", "max_hours", "evaluation_overrun"


class Reason(StrEnum):
    """How a start of a run ended; a start without an end was killed or is running."""

    DONE = "done"
    TIME_LIMIT = "time limit"
    EVALUATION_OVERRUN = "evaluation over its time limit"
    NOTHING_LEFT = "finished before"
    FAULT = "stopped by a fault"
    FAILED = "failed"
    REFUSED = "refused"
    INTERRUPTED = "interrupted"
    KILLED = "killed"


REASONS = {
    ExitCode.DONE: Reason.DONE,
    ExitCode.FAILED: Reason.FAILED,
    ExitCode.NOTHING_LEFT: Reason.NOTHING_LEFT,
    ExitCode.PREFLIGHT: Reason.REFUSED,
    ExitCode.INTEGRITY: Reason.FAULT,
    ExitCode.INTERRUPTED: Reason.INTERRUPTED,
}


def note(run_dir: Path, kind: str, text: str) -> None:
    """Records an event from a worker process and prints it to the worker's output."""
    print(redact(text), flush=True)
    record(run_dir, kind, text)


def record(run_dir: Path, kind: str, text: str, **more) -> None:
    append_json(Path(run_dir) / EVENTS, {"time": time.time(), "kind": kind, "text": redact(text), **more})


def start(run_dir: Path, planned: int | None, command: str | None = None) -> None:
    """The first event of every start. A start before it that has no end gets one here: it was killed."""
    before = _last_start(run_dir)
    if before and before[-1].get("kind") != END:
        _end(run_dir, Reason.KILLED, "found at the next start", None, before[0].get("planned"))
    record(run_dir, START, "start", planned=planned, command=command)


def how(run_dir: Path, code: ExitCode, why: str, planned: int | None) -> tuple[Reason, str]:
    """How a start ended, and why. When a time limit ended the run, its note is the reason."""
    notes = {row.get("kind"): row["text"] for row in _last_start(run_dir)}
    if code == ExitCode.DONE and MAX_HOURS in notes and steps_done(run_dir) != planned:
        return Reason.TIME_LIMIT, notes[MAX_HOURS]
    if code == ExitCode.FAILED and EVALUATION_OVERRUN in notes:
        return Reason.EVALUATION_OVERRUN, notes[EVALUATION_OVERRUN]
    return REASONS[code], why


def end(run_dir: Path, code: ExitCode, why: str, planned: int | None, **more) -> str:
    """The last event of a start; returns its text."""
    reason, why = how(run_dir, code, why, planned)
    return _end(run_dir, reason, why, code, planned, **more)


def _end(run_dir: Path, reason: Reason, why: str, code: ExitCode | None, planned: int | None, **more) -> str:
    why = redact(why)  # an error may name an address with a password
    done = steps_done(run_dir)
    steps = f"{done} of {planned} steps" if planned else f"{done} steps"
    text = f"{reason}, {steps} done" + (f": {why}" if why else "")
    record(
        run_dir,
        END,
        text,
        reason=reason,
        why=why,
        exit_code=code,
        planned_steps=planned,
        done_steps=done,
        **more,
    )
    return text


def _last_start(run_dir: Path) -> list[dict]:
    """The events from the last start on; none where there was no start."""
    rows = read_json_lines(Path(run_dir) / EVENTS)
    starts = [place for place, row in enumerate(rows) if row.get("kind") == START]
    return rows[starts[-1] :] if starts else []


def steps_done(run_dir: Path) -> int:
    """Returns the number of the last step in the run's metrics."""
    try:
        steps = [row.get("step") for row in read_json_lines(Path(run_dir) / METRICS)]
    except DamagedFile:
        return 0
    return max((step for step in steps if type(step) is int), default=0)
