"""The panels of the learning curves, with their lines, units and captions; and of what happened inside the steps."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from verl_credit.names import EXPLAINED_VARIANCE, OUR_REWARD
from verl_credit.records.report.run_data import Run, Series
from verl_credit.records.report.text import percent, plain, seconds, signed

# Okabe and Ito's palette, which colour-blind readers can distinguish, and greys.
INK, GREY, BLUE, VERMILION, GREEN = "#222222", "#8a8f98", "#0072b2", "#d55e00", "#009e73"
_COLORS = (BLUE, VERMILION, GREEN, "#cc79a7", "#e69f00", "#56b4e9", INK, GREY)
_DASHES = ("-", (0, (4, 2)), (0, (1, 1)))
_BY_MODE = {"greedy": BLUE, "sampled": VERMILION}
_BY_SOURCE = ("-", (0, (1, 1)), (0, (4, 1, 1, 1)))
# Turns are ordered, so their colours are too: dark to light along one ramp.
_BY_TURN = ("#1b3a6b", "#2f6fa8", "#4aa3b8", "#86c9a4", "#c9dd7e")
# The parts of a step's time, in verl's order; other names are in none of them.
PHASES = ("gen", "old_log_prob", "info_gain", "ref", "values", "adv", "update_critic", "update_actor", "update_weights",
          "save_checkpoint", "testing")  # fmt: skip


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
    """Returns the panels of every report: without data a panel names what it needs."""
    return [
        *([_own_reward(run)] if run.own_reward else [_em(run), _reward(run)]),
        Panel(
            "Turns", "turns per trajectory", "Turns of the policy, mean over the trajectories trained on.",
            _lines(run, {"turns": "credit/turns_per_row"}, INK), "credit/turns_per_row in metrics.jsonl",
        ),
        _gain(run),
        Panel(
            "Groups without contrast", "number of groups",
            "Questions whose trajectories all have the same outcome: their outcome advantage is 0.",
            _lines(run, {"all solved": "credit/groups/all_solved"}, BLUE)
            + _lines(run, {"all failed": "credit/groups/all_failed"}, VERMILION),
            "credit/groups/all_solved and all_failed in metrics.jsonl",
        ),
        Panel(
            "Clipped tokens", "share of tokens (%)",
            "Tokens whose policy ratio left its turn's clip range, so that they gave no gradient.",
            _lines(run, {"clipped": "actor/pg_clipfrac"}, INK), "actor/pg_clipfrac in metrics.jsonl", percent,
        ),
    ]  # fmt: skip


def _reward(run: Run) -> Panel:
    path = run.settings.get("reward.custom_reward_function.path", OUR_REWARD)
    of = "Exact match plus any format penalty" if path == OUR_REWARD else f"By {path}"
    of = "The environment's outcome (environment.outcome)" if run.in_environment else of
    return Panel(
        "Reward", "mean reward per trajectory", f"{of}: what the outcome part of the advantage is made of.",
        _lines(run, {"reward": "critic/score/mean"}, INK), "critic/score/mean in metrics.jsonl",
    )  # fmt: skip


def _own_reward(run: Run) -> Panel:
    """In place of exact match, which the run's reward function does not give."""
    path = run.settings.get("reward.custom_reward_function.path", OUR_REWARD)
    of = (
        "Of the agent loop or of verl's own function for the data source"
        if path in (OUR_REWARD, "null")
        else f"By {path}"
    )
    training = Line("training", run.series("critic/score/mean"), GREY, width=1.3)
    return Panel(
        "Reward", "mean reward per trajectory",
        f"{of}: what the outcome part of the advantage is made of. Training questions change from step to step, the "
        "held-out ones stay.",
        tuple(line for line in [*_held_out(run), training] if line.series),
        "critic/score/mean in metrics.jsonl and val-*/…-greedy|sampled/reward in validation.jsonl",
    )  # fmt: skip


def _held_out(run: Run) -> list[Line]:
    """A line for each data source and mode; with one source also of its well-formatted answers."""
    lines, held_out = [], run.held_out()
    sources = sorted({entry.source for entry in held_out})
    for entry in held_out:
        dash = _BY_SOURCE[sources.index(entry.source) % len(_BY_SOURCE)]
        name = f"held-out, {entry.mode}" + (f" ({entry.source})" if len(sources) > 1 else "")
        color, formatted = _BY_MODE[entry.mode], entry.em_well_formatted
        lines.append(Line(name, entry.score, color, dash))
        if len(sources) == 1:  # with several sources only the table has it: the picture would be crowded
            lines.append(Line(f"{entry.mode}, if in format", formatted, color, (0, (4, 3)), 1.0))
    return lines


def _em(run: Run) -> Panel:
    lines = _held_out(run)
    lines.append(Line("training", run.series("credit/outcome/em"), GREY, width=1.3))
    title, of = "Exact match", "answers equal to a gold answer after normalisation"
    if run.in_environment:
        title, of = "Success", "rollouts whose environment ended with a success"
    return Panel(
        title, f"{title.lower()} (%)",
        f"Share of {of}. Training questions change from step to "
        "step, the held-out ones stay. “If in format”: among well-formatted answers only.",
        tuple(line for line in lines if line.series),
        "credit/outcome/em in metrics.jsonl and val-*/…-greedy|sampled/em in validation.jsonl", percent, top=1.0,
    )  # fmt: skip


def _gain(run: Run) -> Panel:
    kind = run.settings.get("algorithm.info_gain_type", "")
    of = {"prob_diff": "probability", "log_prob_diff": "nats per gold token"}.get(kind, "per turn")
    unit = f"information gain ({of})"
    caption = "How much more likely the gold answer became from one turn to the next."
    if run.other_signal:
        unit, caption = "turn reward", "What the turn signal gave a turn."
    lines = [Line("mean of all turns", run.series(f"{run.reward_metric}/mean"), INK, width=2.2)]
    for name in run.names(rf"{run.reward_metric}/turn_(\d+)"):
        index = int(name.rsplit("_", 1)[1])
        color = _BY_TURN[min(index, len(_BY_TURN) - 1)]
        lines.append(Line(f"turn {index + 1}", run.series(name), color, width=1.2))
    return Panel(
        run.reward_title, unit, f"{caption} Later turns are means over the fewer trajectories that have them.",
        tuple(line for line in lines if line.series), f"{run.reward_metric}/mean in metrics.jsonl", signed, zero=True,
    )  # fmt: skip


def step_panels(run: Run) -> list[Panel]:
    """Returns the panels that have data: not every run has SEPA, or tables."""
    stops = sorted({name for row in run.metrics for name in row if re.fullmatch(r"credit/stop/\w+", name)})
    stop_lines = _lines(run, {name.removeprefix("credit/stop/").replace("_", " "): name for name in stops})
    candidates = [
        Panel(
            "Explained variance of values", "share of the variance",
            "Of outcomes, on questions that the fit has not seen; and how much less each state leaves open than the one "
            "before it. At 0 the values, or their changes, say nothing.",
            _lines(run, {"outcomes": EXPLAINED_VARIANCE, "changes": f"{EXPLAINED_VARIANCE}_of_changes"}),
            f"{EXPLAINED_VARIANCE} in metrics.jsonl", signed, zero=True,
        ),
        Panel(
            "SEPA's lambda", "lambda",
            "How far uncertainties of execution tokens are pooled: 0 not at all, 1 to their mean.",
            _lines(run, {"lambda": "credit/sepa_lambda"}), "credit/sepa_lambda in metrics.jsonl",
        ),
        Panel(
            "Time by phase", "seconds a step",
            "Where a step's time goes; evaluations and checkpoints in steps that have them.",
            _lines(run, {phase.replace("_", " "): f"timing_s/{phase}" for phase in PHASES}),
            "timing_s/ in metrics.jsonl", seconds,
        ),
        Panel(
            "Why rollouts stopped", "share of rollouts (%)", "Reasons that no rollout had are left out.",
            tuple(line for line in stop_lines if any(line.series.values)), "credit/stop/ in metrics.jsonl", percent,
        ),
    ]  # fmt: skip
    return [panel for panel in candidates if panel.lines]


def _lines(run: Run, names: Mapping[str, str], *colors: str) -> tuple[Line, ...]:
    """Returns a line for each metric of ``names``, by label, that the run recorded."""
    colors, lines = colors or _COLORS, []
    for label, series in [(label, run.series(name)) for label, name in names.items()]:
        if series:
            turn, place = divmod(len(lines), len(colors))
            lines.append(Line(label, series, colors[place], _DASHES[turn % len(_DASHES)]))
    return tuple(lines)
