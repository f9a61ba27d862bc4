"""Two runs on one page: their curves over each other, and the settings that differ."""

from __future__ import annotations

from verl_credit.records.report.curves import panel_data_uri
from verl_credit.records.report.numbers import percent, plain, seconds, signed
from verl_credit.records.report.page import template
from verl_credit.records.report.panels import BLUE, VERMILION, Line, Panel
from verl_credit.records.report.run_data import Run
from verl_credit.records.report.summary import ending, held_out_lines

Settings = dict[str, list[tuple[str, str, str]]] | None
"""Per group of keys: (key, value in A, value in B); None: not known."""

_CURVES = (
    ("Exact match in training", "exact match (%)", "credit/outcome/em", percent),
    ("Reward", "mean reward per trajectory", "critic/score/mean", plain),
    ("Turns", "turns per trajectory", "credit/turns_per_row", plain),
    ("Information gain", "mean of all turns", "credit/gain/mean", signed),
    ("Turn reward", "mean of all turns", "credit/turn_reward/mean", signed),
    ("Groups without contrast", "number of groups", "credit/groups/tied", plain),
    ("Size of token advantages", "standard deviation", "credit/advantage/token_std", plain),
    ("Entropy of the policy", "nats per token", "actor/entropy", plain),
    ("Clipped tokens", "share of tokens (%)", "actor/pg_clipfrac", percent),
    ("Time per step", "seconds", "timing_s/step", seconds),
)


def two_runs(a: Run, b: Run, settings: Settings) -> str:
    """A complete HTML document without a script."""
    panels = _held_out(a, b) + [
        _panel(title, unit, a.series(name), b.series(name), form) for title, unit, name, form in _CURVES
    ]
    return template("two_runs.html").render(
        runs=[
            {"name": letter, "run": run, "ending": ending(run), "held_out": held_out_lines(run)}
            for letter, run in (("A", a), ("B", b))
        ],
        panels=[panel for panel in panels if panel.lines],
        picture=panel_data_uri,
        settings=settings,
        problems=[
            f"{letter}: {run.config_problem}." for letter, run in (("A", a), ("B", b)) if run.config_problem
        ],
    )


def _panel(title: str, unit: str, a, b, form) -> Panel:
    lines = (Line("A", a, BLUE), Line("B", b, VERMILION, (0, (4, 2))))
    return Panel(title, unit, "", tuple(line for line in lines if line.series), "metrics.jsonl", form)


def _held_out(a: Run, b: Run) -> list[Panel]:
    """One panel per data source and mode that either was evaluated on."""
    found: dict[tuple[str, str], list] = {}
    for place, run in enumerate((a, b)):
        for entry in run.held_out():
            found.setdefault((entry.mode, entry.source), [a.series(""), b.series("")])[place] = entry.em
    return [
        _panel(f"Held-out exact match, {mode}, {source}", "exact match (%)", *series, percent)
        for (mode, source), series in sorted(found.items())
    ]
