"""The held-out trajectories of an evaluation (`evaluation.keep_trajectories`): a file for each evaluated step, a JSON object
for each trajectory."""

import json
from collections.abc import Iterable
from pathlib import Path

from verl_credit.records.run.files import plain, read_json_lines, write_text

FOLDER = "held_out"
EVALUATION = "evaluation.json"
"""The measures of an evaluation, which are written last: a folder without this file holds a try that failed."""


def held_out_path(run_dir: Path, step: int) -> Path:
    return Path(run_dir) / FOLDER / f"step_{step:06d}.jsonl"


def write_held_out(run_dir: Path, step: int, rows: Iterable[dict]) -> Path:
    """Replaces the file of the step as a whole, because a resumed run may evaluate a step again."""
    lines = (json.dumps(plain(row)) + "\n" for row in rows)
    return write_text(held_out_path(run_dir, step), "".join(lines))


def read_held_out(run_dir: Path, step: int) -> list[dict]:
    """The rows of `host.step.held_out.held_out_rows`. Raises DamagedFile; a missing file gives an empty list."""
    return read_json_lines(held_out_path(run_dir, step))
