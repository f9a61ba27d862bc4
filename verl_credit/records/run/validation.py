"""An evaluation's metrics by data source and mode, and its trajectories (`evaluation.keep_trajectories`): a file for each
evaluated step, a JSON object for each trajectory."""

import json
import re
from collections.abc import Iterable
from pathlib import Path

from verl_credit.records.run.files import plain, read_json_lines, write_text

FOLDER = "held_out"
EVALUATION = "evaluation.json"
"""The measures of an evaluation, which are written last: a folder without this file holds a try that failed."""
EM, REWARD = "em", "reward"
_NAME = re.compile(rf"val-(?:core|aux)/(.+)-(greedy|sampled)/({EM}|format_ok|{REWARD})/mean@(\d+)")


def held_out_names(names: Iterable[str]) -> dict[tuple[str, str], dict[str, str]]:
    """For each (data source, mode), greedy before sampled, the names of its scores, with the largest n of ``mean@n``.

    The outcome is left out where there is exact match: it stands for the answers of a reward function of the user's own."""
    found: dict[tuple[str, str], dict[str, tuple[int, str]]] = {}
    for name in names:
        if match := _NAME.fullmatch(name):
            source, mode, score, n = match.groups()
            of = found.setdefault((source, mode), {})
            of[score] = max(of.get(score, (0, "")), (int(n), name))
    return {
        key: {score: name for score, (_, name) in of.items() if score != REWARD or EM not in of}
        for key, of in sorted(found.items())
    }


def held_out_path(run_dir: Path, step: int) -> Path:
    return Path(run_dir) / FOLDER / f"step_{step:06d}.jsonl"


def write_held_out(run_dir: Path, step: int, rows: Iterable[dict]) -> Path:
    """Replaces the file of the step as a whole, because a resumed run may evaluate a step again."""
    lines = (json.dumps(plain(row)) + "\n" for row in rows)
    return write_text(held_out_path(run_dir, step), "".join(lines))


def read_held_out(run_dir: Path, step: int) -> list[dict]:
    """The rows of `host.step.held_out.held_out_rows`. Raises DamagedFile; a missing file gives an empty list."""
    return read_json_lines(held_out_path(run_dir, step))
