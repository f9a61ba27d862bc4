"""Kills runs of the tiny lab with each asynchronous trainer, gives the same command again, and compares.

    python evidence/async/kill_and_resume.py --dir DIR [--modes credit credit_separate_async] [--again]

Per mode: undisturbed runs of one command, then one that is killed at every point of ASYNC_KILL_POINTS (tests/kit/faults.py).
Runs of four steps; what is done is left out the next time. One JSON line per killed run in kill_and_resume.jsonl, beside
this file, and one per pair of runs: how far apart the metrics of a step are, of those in which two runs of `credit` agree.
Of a killed run these are the steps that were trained after the resume: those before it are of an undisturbed run.
`--again`: the tables alone.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections import defaultdict
from dataclasses import asdict
from itertools import combinations
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[1] / "tests"))

from kit.faults import (  # noqa: E402
    ASYNC_KILL_POINTS,
    SAVED,
    compared,
    distance,
    run_killed,
    run_straight,
    wrong_ages,
)
from verl_credit.names import ASYNC_MODES, TRAINING_MODES  # noqa: E402

RESULTS = HERE / "kill_and_resume.jsonl"
UNDISTURBED, SAME = 2, 1e-5
"""Runs that are compared with each other; metrics that differ by less are the same."""
SHOWN = ("actor/grad_norm", "credit/gain/mean", "credit/staleness/mean")
"""Metrics whose own differences are kept."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dir", type=Path, default=Path("/tmp/verl_credit_async_kills"), help="of the runs")
    parser.add_argument("--modes", nargs="+", choices=TRAINING_MODES, default=list(ASYNC_MODES))
    parser.add_argument("--again", action="store_true", help="run nothing; print the tables")
    asked = parser.parse_args()
    if not asked.again:
        measure(asked.dir.resolve(), asked.modes)
    rows = read()
    print(killed_table(rows), pairs_table(rows), sep="\n\n")


def measure(folder: Path, modes: list[str]) -> None:
    lab, done = folder / "lab", {name_of(row) for row in read()}
    straight = {
        mode: [folder / mode / f"undisturbed-{number}" for number in range(UNDISTURBED)] for mode in modes
    }
    for mode, places in straight.items():
        for place in places:
            if not (place / "run" / "report.html").exists():
                run_straight(place, lab, setting(mode))
        for a, b in combinations(range(UNDISTURBED), 2):
            keep_pair(done, mode, f"undisturbed {a}, {b}", places[a], places[b])
    for number, point in enumerate(ASYNC_KILL_POINTS):
        for mode in modes:
            if (mode, point.name) in done:
                continue
            place = folder / mode / f"killed-{number}-{int(time.time())}"
            outcome = run_killed(place, lab, point, None, setting(mode))
            outcome.lost += wrong_ages(place / "run") if mode in ASYNC_MODES else []
            write({"mode": mode, "point": point.name, **asdict(outcome)})
            for other, run in enumerate(straight[mode]):
                keep_pair(done, mode, f"{point.name}, undisturbed {other}", place, run, outcome.resumed_from)


def name_of(row: dict) -> tuple[str, str]:
    return row["mode"], row.get("pair") or row["point"]


def setting(mode: str) -> str:
    return f"trainer.v1.trainer_mode={mode}"


def keep_pair(done: set, mode: str, name: str, one: Path, other: Path, after: int = 0) -> None:
    """Of the steps after ``after``, if there are any."""
    steps = {step: of for step, of in apart(one / "run", other / "run").items() if step > after}
    if steps and (mode, name) not in done:
        write({"mode": mode, "pair": name, "steps": steps})


def apart(one: Path, other: Path) -> dict[int, dict]:
    """Per step: how many metrics differ, of how many; the median of the differences; those of some metrics."""
    found: dict[int, dict[str, float]] = defaultdict(dict)
    for file, step, name, value, its in compared(one, other):
        found[step][f"{file}:{name}"] = distance(value, its)
    return {
        step: {
            "metrics": len(all_of),
            "differ": sum(value > SAME for value in all_of.values()),
            "median": statistics.median(all_of.values()),
            "shown": {
                name: round(value, 6)
                for key, value in all_of.items()
                if (name := key.split(":", 1)[1]) in SHOWN or name.endswith("-greedy/em/mean@1")
            },
        }
        for step, all_of in sorted(found.items())
    }


def write(row: dict) -> None:
    with RESULTS.open("a") as file:
        file.write(json.dumps(row) + "\n")
    print(json.dumps(row), flush=True)


def read() -> list[dict]:
    return [json.loads(line) for line in RESULTS.read_text().splitlines()] if RESULTS.exists() else []


def killed_table(rows: list[dict]) -> str:
    lines = [
        "| trainer | killed | exit code | goes on from step | exit code | processes lived on | lost |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        if "point" in row:
            lost = "; ".join(row["lost"]) or "nothing"
            lines.append(
                f"| `{row['mode']}` | {row['point']} | {row['first']} | {row['resumed_from']} | {row['second']} | "
                f"{row['seconds_to_the_last_process']:.1f} s | {lost} |"
            )
    return "\n".join(lines)


def pairs_table(rows: list[dict]) -> str:
    """Of undisturbed runs against each other, and of killed ones against them: the first step after the resume."""
    lines = [
        "| trainer | step | undisturbed runs, against each other: metrics that differ, median difference | "
        "killed runs, against undisturbed ones: metrics that differ, median difference |",
        "|---|---|---|---|",
    ]
    undisturbed, killed = defaultdict(list), defaultdict(list)
    for row in rows:
        if "pair" in row and row["pair"].startswith("undisturbed"):
            undisturbed[row["mode"]].append(row["steps"])
        elif "pair" in row:
            killed[row["mode"], min(row["steps"], key=int)].append(row["steps"])
    for mode, pairs in undisturbed.items():
        for step in sorted(step for its, step in killed if its == mode) or [str(SAVED + 1)]:
            cells = [said([of[step] for of in every if step in of]) for every in (pairs, killed[mode, step])]
            lines.append(f"| `{mode}` | {step} | {' | '.join(cells)} |")
    return "\n".join(lines)


def said(of: list[dict]) -> str:
    if not of:
        return "not measured"
    differ = f"{spread([one['differ'] for one in of])} of {max(one['metrics'] for one in of)}"
    pairs = f"{len(of)} pair{'s' * (len(of) > 1)}"
    return f"{differ}, {spread([one['median'] for one in of])} ({pairs})"


def spread(values: list[float]) -> str:
    """Smallest to largest."""
    low, high = f"{min(values):.2g}", f"{max(values):.2g}"
    return low if low == high else f"{low} to {high}"


if __name__ == "__main__":
    main()
