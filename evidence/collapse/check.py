"""Which alarms (`verl_credit/records/run/alarms.py`) recorded runs would have given, and at which step:

    python evidence/collapse/check.py

Healthy runs are those of other topics' archives, as far as these have the metrics; this topic's own archive has whole runs,
healthy and collapsed. README.md has the table that this prints.
"""

from __future__ import annotations

import importlib.util
import json
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from verl_credit.records.run.alarms import REWARD, Watch
from verl_credit.records.run.files import read_json_lines

HERE = Path(__file__).resolve().parent
SETTINGS = {"half_lr": "0.00025", "twice_n": 16}
EM = "credit/outcome/em"


def _archive():
    spec = importlib.util.spec_from_file_location("archive", HERE.parent / "archive.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def replay(rows: Iterable[Mapping]) -> dict[str, int]:
    """The first step of every alarm. Without a reward in the record exact match is the reward, as in the lab."""
    by_step: dict[int, dict] = {}
    for row in rows:
        by_step[row["step"]] = by_step.get(row["step"], {}) | row
    watch, found = Watch(HERE / "no run", 0, SETTINGS), {}
    for step, row in sorted(by_step.items()):
        for name, _ in watch.see(step, ({REWARD: row[EM]} if EM in row else {}) | row):
            found.setdefault(name, step)
    return found


def _of_lists(found: Mapping) -> list[dict]:
    """The rows of a result file of evidence/lab, which has a list per metric."""
    names = {EM: "train_em", "actor/entropy": "entropy"}
    rows = [
        {"step": step, **{name: found[key][step - 1] for name, key in names.items()}}
        for step in range(1, 1 + len(found["train_em"]))
    ]
    held_out = [
        {"step": row["step"]}
        | {f"val-aux/lab-{mode}/em/mean@1": row[mode]["em"] for mode in ("greedy", "sampled") if mode in row}
        for row in found["held_out"]
    ]
    return rows + held_out


def runs() -> Iterator[tuple[str, str, list[dict]]]:
    """(group of runs, name, rows of metrics.jsonl and validation.jsonl) of every recorded run."""
    archive = _archive()
    with tempfile.TemporaryDirectory() as folder:
        for topic in ("lab", "campaigns", "async", "collapse"):
            archive.unpack(HERE.parent / topic, Path(folder) / topic)
        for path in sorted(Path(folder, "lab", "results").glob("*-*.json")):
            found = json.loads(path.read_text())
            yield f"lab, {found['condition']}", path.stem, _of_lists(found)
        for path in sorted(Path(folder, "campaigns").glob("*/*/*/validation.jsonl")):
            metrics = read_json_lines(path.with_name("metrics.jsonl"))
            yield path.parts[-4], f"{path.parts[-3]} {path.parts[-2]}", read_json_lines(path) + metrics
        for path in sorted(Path(folder, "async", "h100").glob("*.json")):
            yield "real_math_cpu on an H100", path.stem, json.loads(path.read_text())["steps"]
        for path in sorted(Path(folder, "collapse").glob("*/*/metrics.jsonl")):
            rows = read_json_lines(path) + read_json_lines(path.with_name("validation.jsonl"))
            yield f"whole, {path.parts[-3]}", path.parts[-2], rows


def table() -> str:
    groups: dict[str, list[tuple[str, list[dict], dict[str, int]]]] = {}
    for group, name, rows in runs():
        groups.setdefault(group, []).append((name, rows, replay(rows)))
    lines = ["| runs | number | steps | alarms, at step |", "|---|---|---|---|"]
    for group, members in groups.items():
        alarmed = [
            f"{name}: {', '.join(f'{one} {at}' for one, at in found.items())}"
            for name, _, found in members
            if found
        ]
        steps = sorted({max(row["step"] for row in rows) for _, rows, _ in members})
        lines.append(
            f"| {group} | {len(members)} | {', '.join(map(str, steps))} | {'; '.join(alarmed) or 'none'} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
