"""How the run ended, what it warned of, and the rows of the table of first and last values."""

import re
from collections.abc import Callable
from typing import NamedTuple

from verl_credit.names import TURNS_CUT
from verl_credit.records.report.run_data import HeldOut, Run, Series, number
from verl_credit.records.report.text import (
    duration,
    interval,
    percent,
    plain,
    points,
    seconds,
    seconds_change,
    signed,
)
from verl_credit.records.run.events import END, START, Reason
from verl_credit.records.run.validation import EM, REWARD

SAID = {
    Reason.DONE: "Done",
    Reason.TIME_LIMIT: "Ended at the time limit",
    Reason.EVALUATION_OVERRUN: "An evaluation took longer than its limit",
    Reason.FAULT: "Stopped by a fault",
    Reason.FAILED: "Failed",
    Reason.REFUSED: "The last start was refused",
    Reason.INTERRUPTED: "Interrupted",
    Reason.KILLED: "Killed",
}
ERRORS = (Reason.EVALUATION_OVERRUN, Reason.FAULT, Reason.FAILED, Reason.REFUSED, Reason.KILLED)


class Ending(NamedTuple):
    text: str
    error: bool = False
    command: str = ""
    size: str = ""
    """The rollouts, questions and updates of a step, beside the recipe's."""


def ending(run: Run) -> Ending:
    """Returns the ending of the last start that had steps left, with its command."""
    start, last = None, None
    for row in run.events:
        if row.get("kind") == START:
            start = row
        elif row.get("kind") == END:
            if str(row.get("reason")) in SAID:
                last = (start or {}, row)
            start = None
    if start is not None:
        text = "This run has no end yet: it goes on, or it was killed."
        return Ending(text, False, *_of_start(start))
    if last is None:
        return Ending("events.jsonl does not say how this run ended.")
    begin, end = last
    planned, done = (number(end.get(name)) for name in ("planned_steps", "done_steps"))
    text = f"{SAID[end['reason']]}: {done or 0:.0f}" + (f" of {planned:.0f}" if planned else "")
    text += " training steps"
    times = [number(row.get("time")) for row in (begin, end)]
    if None not in times and end["reason"] != Reason.KILLED:  # the time of a kill is not recorded
        text += f", {duration(max(times[1] - times[0], 0.0))} since the start"
    why = str(end.get("why") or "")
    return Ending(f"{text}: {why}" if why else f"{text}.", end["reason"] in ERRORS, *_of_start(begin))


def _of_start(start: dict) -> tuple[str, str]:
    return str(start.get("command") or ""), str(start.get("size") or "")


_WARNING = re.compile("(warning|without effect): ")


def notes(run: Run) -> tuple[list[str], list[str]]:
    """Returns the run's warnings, of those that differ in their numbers alone the last; and its other notes: the last
    banner, which is in force, the keys that nothing reads, and every resume."""
    texts = [str(row.get("text", "")) for row in run.events]
    warnings = {re.sub(r"\d+", "", text): text for text in texts if _WARNING.match(text)}
    idle = [text for text in dict.fromkeys(run.event("idle")) if not _WARNING.match(text)]
    return list(warnings.values()), run.event("banner")[-1:] + idle + run.event("resume")


SHOWN_AS = {EM: ("Exact match (EM)", percent, points), REWARD: ("Reward", plain, signed)}
"""A held-out score's name, its values and their changes."""


def held_out_lines(run: Run) -> list[str]:
    """The first and the last exact match (or reward) of each source, of greedy answers where there are some."""
    lines: dict[str, str] = {}
    for entry in run.held_out():  # greedy comes before sampled
        steps, values, known = entry.score.steps, entry.score.values, _interval(entry)
        name, (_, value, _) = (
            {EM: "exact match (EM, "}.get(entry.measure, "reward ("),
            SHOWN_AS[entry.measure],
        )
        line = f"Held-out {name}{entry.mode}, {entry.source}): {value(values[-1])} at step {steps[-1]}"
        line += f" ({known})" if known else ""
        first = f", {value(values[0])} at step {steps[0]}" if len(steps) > 1 else ""
        lines.setdefault(entry.source, f"{line}{first}.")
    return list(lines.values())


def _interval(entry: HeldOut) -> str:
    """How many questions the last value is of, where that is known, and its interval: a reward's bounds are not known."""
    em = entry.score.values[-1]
    count = dict(zip(entry.questions.steps, entry.questions.values, strict=True)).get(
        entry.score.steps[-1], 0
    )
    if count >= 1 and entry.measure != EM:
        return f"{count:.0f} questions"
    if count < 1 or not 0.0 <= em <= 1.0:
        return ""
    low, high = interval(em, int(count))
    return f"{count:.0f} questions, 95 % interval {percent(low)} to {percent(high)}"


class Row(NamedTuple):
    label: str
    series: Series
    value: Callable[[float], str]
    change: Callable[[float], str]
    note: str = ""
    """What the last value needs beside it."""


def held_out_rows(run: Run) -> list[Row]:
    held_out = run.held_out()
    several = len({entry.source for entry in held_out}) > 1
    rows = []
    for entry in held_out:
        suffix = entry.mode + (f", {entry.source}" if several else "")
        label, *forms = SHOWN_AS[entry.measure]
        rows.append(Row(f"{label}, {suffix}", entry.score, *forms, _interval(entry)))
        if entry.measure == EM:
            rows.append(
                Row(f"EM of well-formatted answers, {suffix}", entry.em_well_formatted, percent, points)
            )
    return rows or [Row(f"Exact match (EM), {m}", Series(), percent, points) for m in ("greedy", "sampled")]


def training_rows(run: Run) -> list[Row]:
    of_ours = [
        Row("Exact match (EM)", run.series("credit/outcome/em"), percent, points),
        Row("Answers in format", run.series("credit/outcome/format_ok"), percent, points),
    ]
    if run.in_environment:
        of_ours = [
            Row("Success", run.series("credit/env/success"), percent, points),
            Row("Return, mean", run.series("credit/env/return"), plain, signed),
            Row("Steps, mean", run.series("credit/env/steps"), plain, signed),
        ]
    ended = [Row("Ended with an answer", run.series("credit/stop/answer"), percent, points)]
    return (
        ([] if run.own_reward else of_ours)
        + ([] if run.in_environment else ended)
        + [
            Row("Turns cut at their token budget", run.series(TURNS_CUT), percent, points),
            Row("Reward, mean", run.series("critic/score/mean"), plain, signed),
            Row("Turns per trajectory", run.series("credit/turns_per_row"), plain, signed),
            Row(f"{run.reward_title}, mean", run.series(f"{run.reward_metric}/mean"), signed, signed),
            Row("Turns with one above 0", run.series(f"{run.reward_metric}/share_positive"), percent, points),
            Row("Clipped tokens", run.series("actor/pg_clipfrac"), percent, points),
            Row("Time per step", run.series("timing_s/step"), seconds, seconds_change),
            Row("Time per step for the gain", run.series("credit/gain/seconds"), seconds, seconds_change),
        ]
    )
