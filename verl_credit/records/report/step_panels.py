"""Panels of what happened inside the steps: distributions of credit, SEPA, time by phase, why rollouts stopped."""

from __future__ import annotations

import re
from pathlib import Path

import torch

from verl_credit.records.report.numbers import percent, plain, seconds, signed
from verl_credit.records.report.panels import BLUE, GREEN, GREY, INK, VERMILION, Line, Panel
from verl_credit.records.report.run_data import Run, Series
from verl_credit.records.run.tables import TURNS, DamagedTable, read_table, tables_of

QUANTILES = {0.05: GREY, 0.25: BLUE, 0.5: INK, 0.75: BLUE, 0.95: GREY}
STEPS_READ = 150
_COLORS = (BLUE, VERMILION, GREEN, "#cc79a7", "#e69f00", "#56b4e9", INK, GREY)
_DASHES = ("-", (0, (4, 2)), (0, (1, 1)))
# The parts of a step's time, in verl's order; other names are in none of them.
PHASES = ("gen", "old_log_prob", "info_gain", "ref", "values", "adv", "update_critic", "update_actor", "update_weights",
          "save_checkpoint", "testing")  # fmt: skip


def step_panels(run: Run) -> list[Panel]:
    """Returns the panels that have data: not every run has SEPA, and runs of earlier versions have no tables."""
    candidates = [
        *_distributions(run.folder, run.metrics[-1]["step"]),
        _lambda(run),
        _uncertainty(run, "mean", "Mean uncertainty", "SEPA leaves the means where they are."),
        _uncertainty(run, "var", "Variance of uncertainty", "SEPA takes it from the execution tokens."),
        _time(run),
        _stops(run),
    ]
    return [panel for panel in candidates if panel.lines]


def _distributions(folder: Path, last_step: int) -> list[Panel]:
    values, unread = _read(folder, last_step)
    left_out = f" {unread} tables could not be read and are left out." if unread else ""
    shares = "5, 25, 50, 75 and 95 % of"
    return [
        Panel(
            "Advantages of turns", "advantage", f"{shares} the turns of each step, answer turns included.{left_out}",
            _quantiles(values, "advantage"), "tables/", signed, zero=True,
        ),
        Panel(
            "Clip scales of turns", "clip scale", f"{shares} the turns with a reward: factors on the clip range.{left_out}",
            _quantiles(values, "clip_scale"), "tables/", plain,
        ),
    ]  # fmt: skip


def _read(folder: Path, last_step: int) -> tuple[dict[int, dict[str, torch.Tensor]], int]:
    """Reads at most ``STEPS_READ`` steps, evenly spread, with the last; also returns how many could not be read."""
    paths = [(step, path) for step, path in tables_of(folder, TURNS).items() if step <= last_step]
    every = -(-len(paths) // STEPS_READ) or 1
    values, unread = {}, 0
    for step, path in paths[::-1][::every][::-1]:
        try:
            c = read_table(path).columns
        except DamagedTable:
            unread += 1
            continue
        lines = list(zip(c["valid"], c["reward"], c["advantage"], c["clip_scale"], strict=True))
        values[step] = {
            "advantage": torch.tensor([a for valid, _, a, _ in lines if valid], dtype=torch.float64),
            "clip_scale": torch.tensor(
                [s for v, r, _, s in lines if v and r is not None], dtype=torch.float64
            ),
        }
    return values, unread


def _quantiles(values: dict[int, dict[str, torch.Tensor]], name: str) -> tuple[Line, ...]:
    values = {step: {name: of_step[name][of_step[name].isfinite()]} for step, of_step in values.items()}
    steps = [step for step, of_step in values.items() if len(of_step[name])]
    if not steps:
        return ()
    shares = torch.tensor(list(QUANTILES), dtype=torch.float64)
    rows = [values[step][name].quantile(shares).tolist() for step in steps]
    return tuple(
        Line(
            percent(share).replace(".0", ""), Series(tuple(steps), tuple(row[place] for row in rows)), color,
            "-" if share == 0.5 else (0, (4, 2)) if color == BLUE else (0, (1, 1)), 2.2 if share == 0.5 else 1.3,
        )
        for place, (share, color) in enumerate(QUANTILES.items())
    )  # fmt: skip


def _lambda(run: Run) -> Panel:
    return Panel(
        "SEPA's lambda", "lambda", "How far uncertainties of execution tokens are pooled: 0 not at all, 1 to their mean.",
        _lines(run, {"lambda": "credit/sepa_lambda"}), "credit/sepa_lambda in metrics.jsonl", plain,
    )  # fmt: skip


def _uncertainty(run: Run, statistic: str, title: str, effect: str) -> Panel:
    lines = []
    for kind, name, color in (("exec", "execution", BLUE), ("plan", "planning", VERMILION)):
        for prefix, when, dash in (("", "before", "-"), ("post_", "after", (0, (4, 2)))):
            if series := run.series(f"credit/{prefix}{kind}_entropy_{statistic}"):
                lines.append(Line(f"{name}, {when}", series, color, dash))
    needs = f"credit/exec_entropy_{statistic} in metrics.jsonl"
    return Panel(
        title,
        title.lower(),
        f"Of execution and planning tokens, before and after pooling. {effect}",
        tuple(lines),
        needs,
    )


def _time(run: Run) -> Panel:
    return Panel(
        "Time by phase", "seconds a step", "Where a step's time goes; evaluations and checkpoints in steps that have them.",
        _lines(run, {phase.replace("_", " "): f"timing_s/{phase}" for phase in PHASES}), "timing_s/ in metrics.jsonl",
        seconds,
    )  # fmt: skip


def _stops(run: Run) -> Panel:
    reasons = {key.replace("_", " "): name for key, name in run_names(run, r"credit/stop/(\w+)").items()}
    return Panel(
        "Why rollouts stopped", "share of rollouts (%)", "Reasons that no rollout had are left out.",
        tuple(line for line in _lines(run, reasons) if any(line.series.values)), "credit/stop/ in metrics.jsonl", percent,
    )  # fmt: skip


def run_names(run: Run, pattern: str) -> dict[str, str]:
    """Metric names that match the whole pattern, by its first group."""
    seen = sorted({name for row in run.metrics for name in row})
    return {match[1]: name for name in seen if (match := re.fullmatch(pattern, name))}


def _lines(run: Run, names: dict[str, str]) -> tuple[Line, ...]:
    recorded = [(label, series) for label, name in names.items() if (series := run.series(name))]
    return tuple(
        Line(label, series, _COLORS[i % len(_COLORS)], _DASHES[i // len(_COLORS) % len(_DASHES)])
        for i, (label, series) in enumerate(recorded)
    )
