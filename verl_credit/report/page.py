"""The page: page.html, filled with the run."""

from __future__ import annotations

import re
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from verl_credit.report.choose import choose, solved
from verl_credit.report.colour import colour, limit
from verl_credit.report.curves import panel_data_uri
from verl_credit.report.groups import heading, searches, sentences
from verl_credit.report.numbers import percent, plain, signed
from verl_credit.report.panels import Panel
from verl_credit.report.run_data import Run
from verl_credit.report.summary import ending, held_out_lines, held_out_rows, training_rows
from verl_credit.run.files import TRAJECTORIES, VALIDATION

# Longer blocks scroll, so that one page of search results does not push the next turn out of sight.
SCROLL_CHARACTERS = 1200
STOPPED = {
    "answer": "stopped with an answer",
    "no_answer": "stopped without an answer",
    "turn_length": "cut at the token budget of its turn",
    "bad_call": "stopped by a call that cannot be read",
    "length": "stopped by the length limit",
    "max_turns": "stopped by the turn limit",
    "tool_fault": "stopped by a fault of the search tool",
}
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
# Characters that HTML cannot carry: controls other than tab and newline get their visible picture.
_CONTROL = {code: 0x2400 + code for code in range(32) if code not in (9, 10)} | {0x7F: 0x2421}
_SURROGATE = re.compile("[\ud800-\udfff]")
_TAG = re.compile(r"&lt;/?(?:think|tool_call|tool_response|answer|search|information)&gt;|&lt;\|\w+\|&gt;")


def clean(value: object) -> str:
    """Text that HTML can carry; nothing is dropped. Markup stays as it is."""
    return value if isinstance(value, Markup) else _SURROGATE.sub("\ufffd", str(value)).translate(_CONTROL)


def dialogue(text: str) -> Markup:
    """Escaped text in which the dialogue's own marks (``<think>``, ``<|im_end|>``) are set back."""
    return Markup(_TAG.sub(r'<span class="mark">\g<0></span>', str(escape(clean(text)))))


def direction(value: float | None, above: str, below: str, zero: str) -> str:
    if value is None:
        return "not recorded"
    return zero if signed(value) == "0.000" else above if value > 0 else below


def page(run: Run, panels: list[Panel]) -> str:
    """A complete HTML document. Both colour scales are shared by all turns shown, so that colours compare."""
    chosen = choose(run.trajectories)
    turns = [turn for row in chosen for one in (row, *row["group"]) for turn in one["turns"]]
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        finalize=clean,
        undefined=StrictUndefined,
    )
    environment.filters |= {"dialogue": dialogue, "signed": signed, "plain": plain, "percent": percent}
    return environment.get_template("page.html").render(
        run=run,
        title=f"Run report: {run.folder.resolve().name}",
        ending=ending(run),
        held_out_lines=held_out_lines(run),
        groups=[("Held-out questions", held_out_rows(run)), ("Training", training_rows(run))],
        panels=panels,
        picture=panel_data_uri,
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
        trajectories=TRAJECTORIES,
    )
