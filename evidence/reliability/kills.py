"""Kills a run of the tiny lab at every point of `tests/kit/faults.py`, gives the same command again, and compares.

    python evidence/reliability/kills.py [--only saving] [--table]

One JSON line per point in kills.jsonl; points that stand there are left out (`--table`: the table alone).
A point takes two runs of four steps.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict
from pathlib import Path

from results import FOLDER, RUNS

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

from kit.faults import KILL_POINTS, run_killed, run_straight

RESULTS = FOLDER / "kills.jsonl"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dir", type=Path, default=RUNS / "kills", help="of the runs")
    parser.add_argument("--only", default="", help="points whose name holds this text")
    parser.add_argument("--table", action="store_true", help="run nothing; print the table")
    asked = parser.parse_args()
    done = read()
    left = [point for point in KILL_POINTS if asked.only in point.name and point.name not in done]
    if left and not asked.table:
        measure(asked.dir.resolve(), left)
    print(table(read()))


def measure(folder: Path, points: list) -> None:
    straight = folder / "straight" / "run"
    if not (straight / "report.html").exists():
        run_straight(folder / "straight", folder / "lab")
    for point in points:
        begun, place = time.time(), folder / f"{KILL_POINTS.index(point):02}-{int(time.time())}"
        outcome = run_killed(place, folder / "lab", point, straight)
        row = {"point": point.name, **asdict(outcome), "seconds": round(time.time() - begun)}
        with RESULTS.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(json.dumps(row), flush=True)


def read() -> dict[str, dict]:
    lines = RESULTS.read_text().splitlines() if RESULTS.exists() else []
    return {row["point"]: row for row in map(json.loads, lines)}


def table(rows: dict[str, dict]) -> str:
    lines = [
        "| killed | exit code | goes on from step | exit code | processes lived on | largest difference | lost |",
        "|---|---|---|---|---|---|---|",
    ]
    for point in KILL_POINTS:
        if row := rows.get(point.name):
            lost = "; ".join(row["lost"]) or "nothing"
            lines.append(
                f"| {point.name} | {row['first']} | {row['resumed_from']} | {row['second']} | "
                f"{row['seconds_to_the_last_process']:.1f} s | {row['largest_difference']:.1e} | {lost} |"
            )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
