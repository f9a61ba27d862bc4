"""The rows of the table of first and last values."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from verl_credit.report.numbers import percent, plain, points, seconds, seconds_change, signed
from verl_credit.report.run_data import Run, Series
from verl_credit.run.turn_cuts import TURNS_CUT


class Row(NamedTuple):
    label: str
    series: Series
    value: Callable[[float], str]
    change: Callable[[float], str]


def held_out_rows(run: Run) -> list[Row]:
    held_out = run.held_out()
    several = len({entry.source for entry in held_out}) > 1
    rows = []
    for entry in held_out:
        suffix = entry.mode + (f", {entry.source}" if several else "")
        rows.append(Row(f"Exact match (EM), {suffix}", entry.em, percent, points))
        rows.append(Row(f"EM of well-formatted answers, {suffix}", entry.em_well_formatted, percent, points))
    return rows or [Row(f"Exact match (EM), {m}", Series(), percent, points) for m in ("greedy", "sampled")]


def training_rows(run: Run) -> list[Row]:
    return [
        Row("Exact match (EM)", run.series("credit/outcome/em"), percent, points),
        Row("Answers in format", run.series("credit/outcome/format_ok"), percent, points),
        Row("Ended with an answer", run.series("credit/stop/answer"), percent, points),
        Row("Turns cut at their token budget", run.series(TURNS_CUT), percent, points),
        Row("Reward, mean", run.series("critic/score/mean"), plain, signed),
        Row("Turns per trajectory", run.series("credit/turns_per_row"), plain, signed),
        Row("Information gain, mean", run.series("credit/gain/mean"), signed, signed),
        Row("Turns with positive gain", run.series("credit/gain/share_positive"), percent, points),
        Row("Clipped tokens", run.series("actor/pg_clipfrac"), percent, points),
        Row("Time per step", run.series("timing_s/step"), seconds, seconds_change),
        Row("Time per step for the gain", run.series("credit/gain/seconds"), seconds, seconds_change),
    ]
