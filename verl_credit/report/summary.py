"""The table of first and last values."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from verl_credit.report.markup import escape
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


def summary_html(run: Run) -> str:
    """Two groups, because evaluations have steps of their own."""
    groups = _group("Held-out questions", held_out_rows(run)) + _group("Training", training_rows(run))
    return f"<table>{groups}</table>"


def _group(name: str, rows: list[Row]) -> str:
    """A heading with the group's first and last step, and its rows."""
    steps = [step for row in rows for step in row.series.steps]
    first, last = (f"Step {min(steps)}", f"Step {max(steps)}") if steps else ("First", "Last")
    head = "".join(f'<th scope="col">{text}</th>' for text in (name, first, last, "Change"))
    body = "".join(_row(row, (min(steps), max(steps)) if steps else (None, None)) for row in rows)
    return f'<tbody><tr class="group">{head}</tr>{body}</tbody>'


def _row(row: Row, steps: tuple) -> str:
    """A value from another step than the heading's says so."""
    head, series = f'<tr><th scope="row">{escape(row.label)}</th>', row.series
    if not series:
        return f'{head}<td colspan="3" class="absent">not recorded</td></tr>'
    cells = []
    for place, step in zip((0, -1), steps, strict=True):
        other = f"<small>step {series.steps[place]}</small>" if series.steps[place] != step else ""
        cells.append(f"<td>{row.value(series.values[place])}{other}</td>")
    if len(series.steps) == 1:
        return f'{head}{cells[0]}<td colspan="2" class="absent">recorded once</td></tr>'
    return f"{head}{''.join(cells)}<td>{row.change(series.values[-1] - series.values[0])}</td></tr>"
