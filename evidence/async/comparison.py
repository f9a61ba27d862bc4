"""What `measure.py` prints: a table of the runs, a table of the trainers over their seeds, and which of them is better.

Held-out EM per minute: the mean exact match of the greedy policy over the first M minutes of its training, evaluations
joined by straight lines. M is the same for all runs: the minutes of the shortest. Minutes are those of steps.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from itertools import pairwise


def tables(runs: dict[str, dict]) -> str:
    """Markdown. ``runs``: what `measure.read` returns, by MODE-SEED."""
    return "\n\n".join((table_of_runs(runs), table_of_modes(runs), better(runs)))


def em_per_minute(run: dict, minutes: float) -> float:
    """Of the first ``minutes``; the curve goes straight from one evaluation to the next."""
    steps = sorted(run["em"], key=int)
    points = [(run["em_at_minute"][step], run["em"][step]) for step in steps]
    area = 0.0
    for (begin, low), (end, high) in pairwise(points):
        until = min(end, minutes)
        if until > begin:
            there = low + (high - low) * (until - begin) / (end - begin)
            area += (until - begin) * (low + there) / 2
    return area / minutes


def shortest(runs: dict[str, dict]) -> float:
    return min(run["minutes_of_steps"] for run in runs.values())


def by_mode(runs: dict[str, dict]) -> dict[str, dict[str, dict]]:
    """mode: seed: run."""
    found: dict[str, dict[str, dict]] = {}
    for name, run in runs.items():
        mode, _, seed = name.rpartition("-")
        found.setdefault(mode, {})[seed] = run
    return found


def table_of_runs(runs: dict[str, dict]) -> str:
    lines = [
        "| run | step, s | of it generation | minutes of steps | held-out EM, greedy, by step | both cores work "
        "| cores used | mean age | oldest | clipped |",
        "|" + "---|" * 10,
    ]
    for name, run in runs.items():
        em = ", ".join(f"{value:.2f}" for value in run["em"].values())
        lines.append(
            f"| {name} | {run['step_s']:.1f} | {run['generation_s']:.1f} | {run['minutes_of_steps']:.1f} | {em} "
            f"| {run['both_cores']:.0%} | {run['cores_used']:.2f} | {run['age']:.2f} | {run['oldest']:.0f} "
            f"| {run['clipped']:.4f} |"
        )
    return "\n".join(lines)


def table_of_modes(runs: dict[str, dict]) -> str:
    """A row per figure, a column per trainer: the mean over its seeds, and the smallest and the largest."""
    minutes, modes = shortest(runs), by_mode(runs)
    evaluated = sorted({int(step) for run in runs.values() for step in run["em"]})
    figures: list[tuple[str, Callable[[dict], float], str]] = [
        ("step, median after the first five, s", lambda run: run["step_s"], ".1f"),
        ("of it waiting for rollouts, s", lambda run: run["generation_s"], ".1f"),
        ("minutes of all steps", lambda run: run["minutes_of_steps"], ".1f"),
        *(
            (
                f"held-out EM, greedy, after step {step}",
                lambda run, step=step: run["em"].get(step, run["em"].get(str(step))),
                ".2f",
            )
            for step in evaluated
        ),
        (
            f"**held-out EM per minute**: mean of the first {minutes:.1f} minutes",
            lambda run: em_per_minute(run, minutes),
            ".3f",
        ),
        ("share of the seconds in which both cores work", lambda run: run["both_cores"], ".0%"),
        ("cores in use", lambda run: run["cores_used"], ".2f"),
        ("age of a turn in steps, mean", lambda run: run["age"], ".2f"),
        ("age of a turn in steps, oldest", lambda run: run["oldest"], ".0f"),
        ("share of tokens clipped", lambda run: run["clipped"], ".3f"),
    ]
    lines = ["| | " + " | ".join(f"`{mode}`" for mode in modes) + " |", "|" + "---|" * (1 + len(modes))]
    lines.append("| seeds | " + " | ".join(", ".join(seeds) for seeds in modes.values()) + " |")
    for label, of, form in figures:
        cells = [over_seeds([of(run) for run in seeds.values()], form) for seeds in modes.values()]
        lines.append(f"| {label} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def over_seeds(values: Sequence[float | None], form: str) -> str:
    """Mean (smallest to largest)."""
    known = [value for value in values if value is not None]
    if not known:
        return ""
    mean = format(statistics.mean(known), form)
    if len(known) == 1:
        return mean
    return f"{mean} ({format(min(known), form)} to {format(max(known), form)})"


def better(runs: dict[str, dict]) -> str:
    """One line: the trainer with the highest held-out EM per minute, and whether every seed that both have agrees."""
    minutes = shortest(runs)
    rates = {
        mode: {seed: em_per_minute(run, minutes) for seed, run in seeds.items()}
        for mode, seeds in by_mode(runs).items()
    }
    first, *others = sorted(rates, key=lambda mode: -statistics.mean(rates[mode].values()))
    best = f"{statistics.mean(rates[first].values()):.3f}"
    if not others:
        return f"Held-out EM per minute: `{first}` has {best}; no other trainer was run."
    said = []
    for other in others:
        shared = rates[first].keys() & rates[other].keys()
        won = sum(rates[first][seed] > rates[other][seed] for seed in shared)
        mean = statistics.mean(rates[other].values())
        told = "" if shared and won == len(shared) and won > 1 else ", not told apart"
        said.append(f"`{other}` {mean:.3f}, lower in {won} of {len(shared)} seeds{told}")
    return f"Better held-out EM per minute: `{first}` with {best}; {'; '.join(said)}."
