"""The panels of the learning curves: their lines, units and captions."""

from __future__ import annotations

from dataclasses import dataclass

from verl_credit.records.report.numbers import percent, plain, signed
from verl_credit.records.report.run_data import Run, Series

# Okabe and Ito's palette, which colour-blind readers can distinguish, and greys.
INK, GREY, BLUE, VERMILION, GREEN = "#222222", "#8a8f98", "#0072b2", "#d55e00", "#009e73"
_BY_MODE = {"greedy": BLUE, "sampled": VERMILION}
# Turns are ordered, so their colours are too: dark to light along one ramp.
_BY_TURN = ("#1b3a6b", "#2f6fa8", "#4aa3b8", "#86c9a4", "#c9dd7e")
_DASHES = ("-", (0, (1, 1)), (0, (4, 1, 1, 1)))


@dataclass(frozen=True)
class Line:
    label: str
    series: Series
    color: str
    dash: object = "-"
    width: float = 1.8
    band: tuple[Series, Series] | None = None
    """Lower and upper edge, drawn around the line."""


@dataclass(frozen=True)
class Panel:
    title: str
    unit: str
    caption: str
    lines: tuple[Line, ...]
    needs: str
    """The source of the numbers, which the page names when they are missing."""
    format: object = plain
    top: float | None = None
    """The axis ends here; by default where the values do."""
    zero: bool = False
    """Values have a meaningful sign: draw a line at 0."""

    @property
    def alt(self) -> str:
        """The panel in words: first and last value of every line."""
        ends = [
            f"{line.label}: {self.format(line.series.values[0])} at step {line.series.steps[0]}, "
            f"{self.format(line.series.values[-1])} at step {line.series.steps[-1]}"
            for line in self.lines
        ]
        return f"{self.title} over training steps. " + "; ".join(ends) + "."


def panels(run: Run) -> list[Panel]:
    return [_em(run), _reward(run), _turns(run), _gain(run), _groups(run), _clip(run)]


def _em(run: Run) -> Panel:
    lines, held_out = [], run.held_out()
    sources = sorted({entry.source for entry in held_out})
    for entry in held_out:
        dash = _DASHES[sources.index(entry.source) % len(_DASHES)]
        name = f"held-out, {entry.mode}" + (f" ({entry.source})" if len(sources) > 1 else "")
        color = _BY_MODE[entry.mode]
        lines.append(Line(name, entry.em, color, dash))
        if len(sources) == 1:  # with several sources only the table has it: the picture would be crowded
            lines.append(
                Line(f"{entry.mode}, if in format", entry.em_well_formatted, color, (0, (4, 3)), 1.0)
            )
    lines.append(Line("training", run.series("credit/outcome/em"), GREY, width=1.3))
    return Panel(
        "Exact match",
        "exact match (%)",
        "Share of answers equal to a gold answer after normalisation. Training questions change from step to "
        "step, the held-out ones stay. “If in format”: among well-formatted answers only.",
        _with_data(lines),
        "credit/outcome/em in metrics.jsonl and val-*/…-greedy|sampled/em in validation.jsonl",
        percent,
        top=1.0,
    )


def _reward(run: Run) -> Panel:
    return Panel(
        "Reward",
        "mean reward per trajectory",
        "Exact match plus any format penalty: what the outcome part of the advantage is made of.",
        _with_data([Line("reward", run.series("critic/score/mean"), INK)]),
        "critic/score/mean in metrics.jsonl",
    )


def _turns(run: Run) -> Panel:
    return Panel(
        "Turns",
        "turns per trajectory",
        "Searches plus the answer turn, mean over the trajectories trained on.",
        _with_data([Line("turns", run.series("credit/turns_per_row"), INK)]),
        "credit/turns_per_row in metrics.jsonl",
    )


def _gain(run: Run) -> Panel:
    unit = {
        "prob_diff": "information gain (probability)",
        "log_prob_diff": "information gain (nats per gold token)",
    }.get(run.settings.get("algorithm.info_gain_type", ""), "information gain (per turn)")
    caption = (
        "What the turn signal gave a turn."
        if run.other_signal
        else "How much more likely the gold answer became from one turn to the next."
    )
    lines = [Line("mean of all turns", run.series(f"{run.reward_metric}/mean"), INK, width=2.2)]
    for name in run.names(rf"{run.reward_metric}/turn_(\d+)"):
        index = int(name.rsplit("_", 1)[1])
        color = _BY_TURN[min(index, len(_BY_TURN) - 1)]
        lines.append(Line(f"turn {index + 1}", run.series(name), color, width=1.2))
    return Panel(
        run.reward_title,
        "turn reward" if run.other_signal else unit,
        f"{caption} Later turns are means over the fewer trajectories that have them.",
        _with_data(lines),
        f"{run.reward_metric}/mean in metrics.jsonl",
        signed,
        zero=True,
    )


def _groups(run: Run) -> Panel:
    lines = [
        Line("all solved", run.series("credit/groups/all_solved"), BLUE),
        Line("all failed", run.series("credit/groups/all_failed"), VERMILION),
    ]
    return Panel(
        "Groups without contrast",
        "number of groups",
        "Questions whose trajectories all have the same outcome: their outcome advantage is 0.",
        _with_data(lines),
        "credit/groups/all_solved and all_failed in metrics.jsonl",
    )


def _clip(run: Run) -> Panel:
    return Panel(
        "Clipped tokens",
        "share of tokens (%)",
        "Tokens whose policy ratio left its turn's clip range, so that they gave no gradient.",
        _with_data([Line("clipped", run.series("actor/pg_clipfrac"), INK)]),
        "actor/pg_clipfrac in metrics.jsonl",
        percent,
    )


def _with_data(lines: list[Line]) -> tuple[Line, ...]:
    return tuple(line for line in lines if line.series)
