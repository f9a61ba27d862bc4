"""A campaign's pictures: curves with bands, and the differences with their intervals."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib import rc_context
from matplotlib.figure import Figure

from verl_credit.records.report.curves import STYLE, saved
from verl_credit.records.report.panels import BLUE, GREEN, GREY, INK, VERMILION, Line, Panel
from verl_credit.records.report.run_data import Series
from verl_credit.records.report.text import MINUS, percent, plain, points, signed
from verl_credit.study.campaign.results import Results
from verl_credit.study.campaign.state import RunState, State
from verl_credit.study.campaign.statistics import Comparison

# Okabe and Ito's palette, which colour-blind readers can distinguish; then again with dashes.
COLOURS = (INK, BLUE, VERMILION, GREEN, "#cc79a7", "#e69f00", "#56b4e9", GREY)
DASHES = ("-", (0, (4, 2)), (0, (1, 1)))


def is_share(results: Results) -> bool:
    """Values from 0 to 1 are written as percentages."""
    values = [value for one in results.states for value in one.curve.values]
    return bool(values) and all(0 <= value <= 1 for value in values)


def value_format(results: Results):
    return percent if is_share(results) else plain


def difference_format(results: Results):
    return points if is_share(results) else signed


def panels(results: Results) -> list[Panel]:
    """All means in one panel, then each condition beside the baseline, with bands."""
    campaign = results.campaign
    lines = {}
    for place, name in enumerate(campaign.conditions):
        runs = [
            one
            for one in results.states
            if one.run.condition == name and one.state is State.DONE and one.curve
        ]
        if runs:
            style = COLOURS[place % len(COLOURS)], DASHES[place // len(COLOURS) % len(DASHES)]
            lines[name] = _mean_line(name, runs, *style)
    bare = tuple(Line(line.label, line.series, line.color, line.dash) for line in lines.values())
    every = [_panel(results, "All conditions", "Means over runs that are done.", bare)]
    for name, line in lines.items():
        beside = [lines[campaign.baseline]] if campaign.baseline in lines else []
        if name != campaign.baseline:
            caption = "Line: mean over runs. Band: from the lowest to the highest run."
            every.append(_panel(results, f"{name} beside {campaign.baseline}", caption, (*beside, line)))
    return every


def _panel(results: Results, title: str, caption: str, lines: tuple[Line, ...]) -> Panel:
    share = is_share(results)
    unit = "percent" if share else "value"
    needs = f"{results.campaign.metric.name} of runs that are done"
    return Panel(title, unit, caption, lines, needs, value_format(results), top=1.0 if share else None)


def _mean_line(name: str, runs: Sequence[RunState], color: str, dash: object) -> Line:
    """The curve over the steps that all runs have."""
    by_run = [dict(zip(one.curve.steps, one.curve.values, strict=True)) for one in runs]
    steps = tuple(sorted(set.intersection(*(set(of) for of in by_run))))
    columns = [[of[step] for of in by_run] for step in steps]
    average = Series(steps, tuple(sum(column) / len(column) for column in columns))
    label = f"{name} ({len(runs)} run{'s' * (len(runs) != 1)})"
    band = Series(steps, tuple(map(min, columns))), Series(steps, tuple(map(max, columns)))
    return Line(label, average, color, dash, band=band)


def differences_picture(results: Results, kind: str) -> bytes:
    """The declared comparisons: every pair's difference as a dot, their mean, and its interval. ``kind``: png or svg."""
    scale = 100 if is_share(results) else 1
    rows = [one.comparison for one in results.judged]
    with rc_context(STYLE):
        figure = Figure(figsize=(8, 1.2 + 0.5 * len(rows)), layout="constrained")
        axes = figure.add_subplot()
        axes.axvline(0, color=GREY, linewidth=0.9, zorder=1)
        for place, c in enumerate(rows):
            for value in _pairs(results, c):
                axes.plot(
                    [scale * value], [place], "o", color=BLUE, alpha=0.35, markersize=4, markeredgewidth=0
                )
            if c.difference.mean is not None:
                axes.plot([scale * c.difference.mean], [place], "D", color=INK, markersize=6)
            if c.difference.low is not None:
                ends = [scale * c.difference.low, scale * c.difference.high]
                axes.plot(ends, [place, place], color=INK, linewidth=2)
        axes.set_yticks(range(len(rows)), [f"{c.a} {MINUS} {c.b}" for c in rows])
        axes.set_ylim(len(rows) - 0.5, -0.5)
        axes.set_xlabel("difference of areas" + (" (points)" if scale == 100 else ""))
        axes.tick_params(length=0)
        axes.grid(axis="x", color="#ebedf0", linewidth=0.8)
        hidden = {"Software": None} if kind == "png" else {"Date": None, "Creator": None}
        return saved(figure, kind, dpi=110, metadata=hidden)


def _pairs(results: Results, c: Comparison) -> list[float]:
    values = {
        (one.run.condition, one.run.block): one.value for one in results.states if one.value is not None
    }
    blocks = sorted(block for name, block in values if name == c.a and (c.b, block) in values)
    return [values[c.a, block] - values[c.b, block] for block in blocks]
