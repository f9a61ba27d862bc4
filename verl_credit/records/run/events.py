"""Notes of a run that a person must see (banner, resume, how it ended), in a file that the progress display reads; and the
warnings of a step that are hard to see in its metrics: turns that are cut, small groups, rows left out."""

from __future__ import annotations

import time
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING

from verl_credit.errors import ExitCode
from verl_credit.names import ANSWER_WHEN_SOLVED
from verl_credit.records.run.files import EVENTS, METRICS, DamagedFile, append_json, read_json_lines
from verl_credit.redact import redact

if TYPE_CHECKING:
    from verl_credit.credit.turn.mode import TurnMode

START, END, MAX_HOURS, EVALUATION_OVERRUN = "start", "end", "max_hours", "evaluation_overrun"
STAGE = "stage"
"""How far a start is: the times of these events are what its parts took."""


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


def start(run_dir: Path, planned: int | None, command: str | None = None, **more) -> None:
    """The first event of every start. A start before it that has no end gets one here: it was killed."""
    before = _last_start(run_dir)
    if before and before[-1].get("kind") != END:
        _end(run_dir, Reason.KILLED, "found at the next start", None, before[0].get("planned"))
    record(run_dir, START, "start", planned=planned, command=command, **more)


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
    return _end(run_dir, *how(run_dir, code, why, planned), code, planned, **more)


def _end(run_dir: Path, reason: Reason, why: str, code: ExitCode | None, planned: int | None, **more) -> str:
    why = redact(why)  # an error may name an address with a password
    done = steps_done(run_dir)
    steps = f"{done} of {planned} steps" if planned else f"{done} steps"
    text = f"{reason}, {steps} done" + (f": {why}" if why else "")
    facts = {"reason": reason, "why": why, "exit_code": code, "planned_steps": planned, "done_steps": done}
    record(run_dir, END, text, **facts, **more)
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


TURNS_CUT_SHARE = 0.05  # above it the budget, and not the policy, decides many outcomes
SMALL_GROUPS_SHARE = 0.25  # share of a step's groups per prompt and tool turn
LEFT_OUT_SHARE = 0.25  # share of a step's valid rows
NEXT_TO_NO_GAIN = 1e-6
"""The size of a gain, and the probability of a gold answer in solved rows, below which gains say nothing."""
TOOLS_PAY = "where tools give rewards, take algorithm.turn_signal=tool_reward"


def cut_note(share: float, step: int, budget: int) -> str | None:
    """Warns if more than ``TURNS_CUT_SHARE`` of the step's turns were cut before their call or answer was complete."""
    if share <= TURNS_CUT_SHARE:
        return None
    what = f"{share:.0%} of the turns were cut at search.max_new_tokens={budget} (credit/stop/turn_length)"
    use = "Raise it and data.max_response_length, or switch thinking off in data.apply_chat_template_kwargs"
    return f"warning: in step {step} {what}. {use}"


def small_groups_note(mode: TurnMode, metrics: Mapping[str, float], step: int, n: int) -> str | None:
    """Warns if more than ``SMALL_GROUPS_SHARE`` of the groups of the step have one member or two."""
    groups, one, two = (metrics.get(f"credit/turn_groups{kind}", 0) for kind in ("", "_of_one", "_of_two"))
    if not mode.per_turn or one + two <= SMALL_GROUPS_SHARE * groups:
        return None
    what = f"{(one + two) / groups:.0%} of the groups per prompt and turn have one member ({one:g}) or two ({two:g})"
    use = "allow fewer turns (search.max_searches), or set algorithm.info_gain_norm_mode=leave_one_out"
    return f"warning: in step {step} {what}. Raise actor_rollout_ref.rollout.n (now {n}), {use}"


def left_out_note(share: float, step: int, mode: str) -> str | None:
    """Warns if more than ``LEFT_OUT_SHARE`` of the step's rows read only their outcome. ``mode``: the turn mode."""
    if share <= LEFT_OUT_SHARE:
        return None
    what = f"{share:.0%} of the rows lack a turn's reward, and algorithm.info_gain_norm_mode={mode} compares whole returns"
    return f"warning: in step {step} {what}. Give 0 for a turn that earned nothing, or set turn-group-v1d"


def unlikely_answers_note(probability: float | None, step: int, template: str) -> str | None:
    """Warns if the policy gives the gold answer next to no probability where its own answer was right.

    ``probability``: the mean over solved rows, after their last observation."""
    if probability is None or probability >= NEXT_TO_NO_GAIN:
        return None
    what = f"solved rollouts give the gold answer a probability of {probability:.1g} ({ANSWER_WHEN_SOLVED})"
    why = f"the policy answers in another form than algorithm.info_gain_template={template!r}, so that gains measure nothing"
    return f"warning: in step {step} {what}: {why}. Write the form of its answers there; {TOOLS_PAY}"


def no_gains_note(largest: float, step: int) -> str | None:
    """Warns if no information gain of the step is larger than rounding. ``largest``: the largest size among them."""
    if largest >= NEXT_TO_NO_GAIN:
        return None
    what = f"no information gain is above {NEXT_TO_NO_GAIN:g} in size (the largest is {largest:.1g})"
    use = "Let algorithm.info_gain_template write the answer as the policy does"
    return f"warning: in step {step} {what}, so that turn credit follows rounding. {use}; {TOOLS_PAY}"
