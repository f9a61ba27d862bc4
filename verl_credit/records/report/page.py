"""The page: page.html, filled with the run."""

from __future__ import annotations

from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template

from verl_credit.records.report.choose import choose, solved
from verl_credit.records.report.colour import colour, limit
from verl_credit.records.report.curves import panel_data_uri
from verl_credit.records.report.groups import heading, searches, sentences
from verl_credit.records.report.lens import NO_TABLES, lens
from verl_credit.records.report.numbers import percent, plain, signed
from verl_credit.records.report.panels import Panel
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
# Is the turn reward another one than information gain? Its name, its short name, and what its sign says.
SIGNALS = {
    False: ("Information gain", "gain", "gold answer likelier", "gold answer less likely", "no difference"),
    True: ("Turn reward", "reward", "above 0", "below 0", "0"),
}


def direction(value: float | None, above: str, below: str, zero: str) -> str:
    if value is None:
        return "not recorded"
    return zero if signed(value) == "0.000" else above if value > 0 else below


def template(name: str) -> Template:
    """What it is given is escaped; what it is not given is an error."""
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

    Both colour scales are shared by all turns shown, so that colours compare."""
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
