"""The page of a run, and the page of two runs with their curves over each other and the settings that differ."""

from __future__ import annotations

from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template

from verl_credit.records.report.choose import choose, heading, searches, sentences, solved
from verl_credit.records.report.curves import panel_data_uri
from verl_credit.records.report.lens import NO_TABLES, lens
from verl_credit.records.report.numbers import colour, limit, percent, plain, seconds, signed
from verl_credit.records.report.panels import BLUE, VERMILION, Line, Panel
from verl_credit.records.report.run_data import Run
from verl_credit.records.report.summary import ending, held_out_lines, held_out_rows, training_rows
from verl_credit.records.report.text import STOPPED, bounded, dialogue
from verl_credit.records.run.files import VALIDATION

# Longer blocks scroll, so that one page of search results does not push the next turn out of sight.
SCROLL_CHARACTERS = 1200
# algorithm.info_gain_context decides what a gain's sign means.
GAIN_MEANS = {
    "observation": "after reading it than before",
    "call": "at the end of the turn's call than at the end of the call before (what it returned counts next turn)",
}
# Key: is the turn reward something else than information gain? Values: its name, its short name, the meaning of its sign.
SIGNALS = {
    False: ("Information gain", "gain", "gold answer likelier", "gold answer less likely", "no difference"),
    True: ("Turn reward", "reward", "above 0", "below 0", "0"),
}


def direction(value: float | None, above: str, below: str, zero: str) -> str:
    if value is None:
        return "not recorded"
    return zero if signed(value) == "0.000" else above if value > 0 else below


def template(name: str) -> Template:
    """Returns a template that escapes every value; a missing value is an error."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        finalize=bounded,
        undefined=StrictUndefined,
    )
    environment.filters |= {"dialogue": dialogue, "signed": signed, "plain": plain, "percent": percent}
    return environment.get_template(name)


def page(run: Run, panels: list[Panel], refresh_s: int | None = None) -> str:
    """A complete HTML document, which a browser reads again every ``refresh_s`` seconds.

    Both colour scales are shared by all turns shown, so that equal colours mean equal values."""
    chosen = choose(run.trajectories)
    turns = [turn for row in chosen for one in (row, *row["group"]) for turn in one["turns"]]
    return template("page.html").render(
        run=run,
        refresh_s=refresh_s,
        title=f"Run report: {run.folder.resolve().name}",
        ending=ending(run),
        held_out_lines=held_out_lines(run),
        groups=[("Held-out questions", held_out_rows(run)), ("Training", training_rows(run))],
        panels=panels,
        picture=panel_data_uri,
        lens=lens(run.folder, run.metrics[-1]["step"]),
        no_tables=NO_TABLES,
        chosen=chosen,
        scales={name: limit(turn.get(name) for turn in turns) for name in ("advantage", "reward")},
        signal=SIGNALS[run.other_signal],
        compared=GAIN_MEANS.get(
            run.settings.get("algorithm.info_gain_context", "observation"), "than before"
        ),
        stopped=STOPPED,
        solved=solved,
        heading=heading,
        searches=searches,
        sentences=sentences,
        colour=colour,
        direction=direction,
        scroll_characters=SCROLL_CHARACTERS,
        validation=VALIDATION,
    )


Settings = dict[str, list[tuple[str, str, str]]] | None
"""The differing settings by group of keys: (key, value in A, value in B); None: they are not known."""

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
    """Returns a panel for each data source and mode of either run's evaluations."""
    series_of: dict[tuple[str, str], list] = {}
    for place, run in enumerate((a, b)):
        for entry in run.held_out():
            series_of.setdefault((entry.mode, entry.source), [a.series(""), b.series("")])[place] = entry.em
    return [
        _panel(f"Held-out exact match, {mode}, {source}", "exact match (%)", *series, percent)
        for (mode, source), series in sorted(series_of.items())
    ]
