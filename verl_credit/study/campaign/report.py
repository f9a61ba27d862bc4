"""The report of a campaign: campaign.html, one offline page, also while runs are missing."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import quote

from matplotlib import rc_context
from matplotlib.figure import Figure

from verl_credit.records.report.curves import STYLE, panel_data_uri, svg_uri
from verl_credit.records.report.page import template
from verl_credit.records.report.panels import BLUE, GREEN, GREY, INK, VERMILION, Line, Panel
from verl_credit.records.report.run_data import Series
from verl_credit.records.report.text import MINUS, duration, percent, plain, points, signed
from verl_credit.records.report.write import REPORT
from verl_credit.records.run.files import write_text
from verl_credit.study.campaign.results import Results, results
from verl_credit.study.campaign.state import RunState, State
from verl_credit.study.campaign.statistics import Mean

PAGE = "campaign.html"
# Okabe and Ito's palette, which colour-blind readers can distinguish; then again with dashes.
COLOURS = (INK, BLUE, VERMILION, GREEN, "#cc79a7", "#e69f00", "#56b4e9", GREY)
DASHES = ("-", (0, (4, 2)), (0, (1, 1)))


def write_campaign_report(folder: Path) -> Path:
    """Write campaign.html into the campaign's folder; returns the page. Raises FileNotFoundError where no campaign was
    started, ConfigError for a damaged record."""
    outcome = results(Path(folder))
    return write_text(outcome.folder / PAGE, page(outcome))


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
        done = [one for one in results.states if one.state is State.DONE and one.curve]
        runs = [one for one in done if one.run.condition == name]
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


def differences_picture(results: Results) -> str:
    """The declared comparisons: every pair's difference as a dot, their mean, and its interval."""
    scale = 100 if is_share(results) else 1
    rows = [one.comparison for one in results.judged]
    values = {
        (one.run.condition, one.run.block): one.value for one in results.states if one.value is not None
    }
    with rc_context(STYLE):
        figure = Figure(figsize=(8, 1.2 + 0.5 * len(rows)), layout="constrained")
        axes = figure.add_subplot()
        axes.axvline(0, color=GREY, linewidth=0.9, zorder=1)
        for place, c in enumerate(rows):
            for block in sorted(block for name, block in values if name == c.a and (c.b, block) in values):
                x, dot = scale * (values[c.a, block] - values[c.b, block]), {"markersize": 4, "alpha": 0.35}
                axes.plot([x], [place], "o", color=BLUE, markeredgewidth=0, **dot)
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
        return svg_uri(figure)


def page(outcome: Results) -> str:
    def link(one: RunState) -> str | None:
        """The address of the run's own report, from the campaign's page on; None where there is none."""
        path = one.folder / REPORT
        return quote(path.relative_to(outcome.folder).as_posix()) if path.exists() else None

    return template(PAGE).render(
        found=outcome,
        campaign=outcome.campaign,
        panels=panels(outcome),
        picture=panel_data_uri,
        differences=differences_picture(outcome),
        interval=interval,
        show=value_format(outcome),
        show_difference=difference_format(outcome),
        link=link,
        state=standing(outcome),
        notes=notes(outcome),
        hours=lambda hours: duration(3600 * hours),
        family=len(outcome.campaign.pairs()),
    )


def standing(outcome: Results) -> str:
    """``3 of 18 runs are done``, and the states of the other runs."""
    counts = Counter(one.state for one in outcome.states)
    others = ", ".join(
        f"{counts[state]} {state}" for state in State if counts[state] and state is not State.DONE
    )
    done = f"{outcome.done} of {len(outcome.states)} runs are done" + (others and f"; {others}")
    budget = outcome.campaign.budget.hours
    return f"{done}. {duration(3600 * outcome.hours)} of runs" + (f" of {budget:g} h." if budget else ".")


def notes(outcome: Results) -> list[str]:
    """Sentences that a reader has to know before any number."""
    few = outcome.campaign.cannot_resolve()
    lines = [f"{few}. More can be added (docs/campaigns.md)."] if few else []
    for row in outcome.added:
        when = time.strftime("%Y-%m-%d", time.gmtime(float(row.get("time", 0))))
        lines.append(
            f"Added on {when}, when {row.get('ended', '?')} runs had ended: {row.get('what', '?')}. If results were seen "
            "before, p-values are too small: doubling the seeds after a look makes 5 % false findings about 8 %."
        )
    bad = [one for one in outcome.states if one.state in (State.FAILED, State.DAMAGED)]
    if bad:
        names = ", ".join(one.run.folder for one in bad)
        why = "Their pairs are left out, which favours a condition whose bad runs fail."
        lines.append(f"Failed or damaged: {names}. {why}")
    if not outcome.campaign.metric.held_out:
        lines.append(f"{outcome.campaign.metric.name} is measured in training, not on held-out questions.")
    return lines


def interval(mean: Mean, show) -> str:
    return mean.why if mean.low is None else f"{show(mean.low)} to {show(mean.high)}"
