"""Generated bad inputs, as many as one likes, held against the laws of the fuzz tests.

    python evidence/reliability/inputs.py [--cases 10000] [--kinds rows,tables] [--minutes 20]

A kind is a file of tests/fuzz; the seed of an input is its number, as in the tests. One JSON line per finished range of
seeds goes to inputs.jsonl: kind, range [first, last], accepted, refused, failures (seed and what went wrong), seconds, and
the seconds of the slowest input. A range that is there is not run again; one with failures is, with `--failed`. The table
at the end counts what the file holds.
"""

from __future__ import annotations

import argparse
import importlib
import json
import logging
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from results import FOLDER

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

from kit.fuzz import ACCEPTED, Check, TooSlow, time_limit, why

KINDS = {
    "configurations": "recipes with other keys and values",
    "recipe_files": "recipes of one's own, damaged YAML",
    "trajectories": "what the policy writes, what a search finds",
    "calls": "tool calls and their arguments",
    "thoughts": "turns of policies that think, with every parser of verl",
    "rows": "parquet files for training",
    "questions": "published question sets for `prepare`",
    "answers": "gold answers in the forms of public files",
    "requests": "requests to the retriever",
    "tables": "tables of trials",
    "run_folders": "run folders for `report` and `diff`",
}
SPAN = 250


def run_span(check: Check, first: int, last: int) -> dict:
    """The line of a range of seeds, without its kind."""
    counts, failures, slowest, begin = {True: 0, False: 0}, [], (0.0, first), time.perf_counter()
    for seed in range(first, last + 1):
        since = time.perf_counter()
        try:
            with time_limit():
                counts[check(seed) == ACCEPTED] += 1
        except (Exception, TooSlow) as error:
            failures.append({"seed": seed, "why": why(error)[:2000]})
        slowest = max(slowest, (time.perf_counter() - since, seed))
    return {
        "range": [first, last],
        "accepted": counts[True],
        "refused": counts[False],
        "failures": failures,
        "seconds": round(time.perf_counter() - begin, 2),
        "slowest_s": round(slowest[0], 3),
    }


def read_lines(path: Path) -> dict[tuple[str, int, int], dict]:
    """The last line of every kind and range."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return {(row["kind"], *row["range"]): row for row in map(json.loads, lines)}


def table(rows: Iterable[dict]) -> str:
    lines = [
        "| kind | inputs | accepted | refused | failures | seconds | slowest |",
        "|---|---|---|---|---|---|---|",
    ]
    rows = list(rows)
    for kind, what in [*KINDS.items(), ("all", "")]:
        own = [row for row in rows if kind in (row["kind"], "all")]
        if not own:
            continue
        accepted, refused, seconds = (
            sum(row[key] for row in own) for key in ("accepted", "refused", "seconds")
        )
        failed = sum(len(row["failures"]) for row in own)
        slowest = max(row["slowest_s"] for row in own)
        name = f"{kind.replace('_', ' ')}: {what}" if what else kind
        counts = f"{accepted + refused + failed} | {accepted} | {refused} | {failed}"
        lines.append(f"| {name} | {counts} | {seconds:.0f} | {slowest:.2f} s |")
    return "\n".join(lines)


@contextmanager
def without_logs() -> Iterator[None]:
    """What is refused is logged, too, in tens of thousands of lines."""
    logging.disable()
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", type=int, default=10_000, help="of each kind, in ranges of 250")
    parser.add_argument("--kinds", default=",".join(KINDS), help="with commas between")
    parser.add_argument("--minutes", type=float, help="no range starts after so many minutes")
    parser.add_argument("--failed", action="store_true", help="run ranges again that have failures")
    parser.add_argument("--jsonl", type=Path, default=FOLDER / "inputs.jsonl")
    options = parser.parse_args()
    done, begin = read_lines(options.jsonl), time.monotonic()
    # Kind by kind in turns, so that an end before the end has some of each.
    wanted = [
        (kind, first, min(first + SPAN, options.cases) - 1)
        for first in range(0, options.cases, SPAN)
        for kind in options.kinds.split(",")
    ]
    for kind, first, last in wanted:
        there = done.get((kind, first, last))
        if there is not None and not (there["failures"] and options.failed):
            continue
        if options.minutes is not None and time.monotonic() - begin > 60 * options.minutes:
            break
        checker = importlib.import_module(f"fuzz.test_fuzz_{kind}").checker
        with tempfile.TemporaryDirectory() as work, checker(Path(work)) as check, without_logs():
            row = {"kind": kind, **run_span(check, first, last)}
        with options.jsonl.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        done[kind, first, last] = row
        print(
            f"{kind} {first} to {last}: {len(row['failures'])} failures, {row['seconds']:.1f} s", flush=True
        )
        for failure in row["failures"][:3]:
            print(f"  seed {failure['seed']}: {failure['why']}", flush=True)
    print(table(done.values()))


if __name__ == "__main__":
    main()
