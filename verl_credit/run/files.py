"""Files of a run: metrics and sample trajectories as JSON lines, plugin state beside verl's checkpoint."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import BinaryIO

METRICS = "metrics.jsonl"
VALIDATION = "validation.jsonl"
TRAJECTORIES = "trajectories.jsonl"
EVENTS = "events.jsonl"
STATE = "verl_credit_state.json"


def append_json(path: Path, row: dict) -> None:
    """One line of ASCII JSON, flushed; numbers that JSON cannot hold become null.

    A last line that a kill cut short is removed first, or the new row would be glued to it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    line = (json.dumps(plain(row)) + "\n").encode("ascii")
    with path.open("a+b") as file:
        _cut_partial_line(file)
        file.write(line)


class DamagedFile(ValueError):
    """A file of a run that cannot be read back; the message names the line."""


def read_json_lines(path: Path) -> list[dict]:
    """All complete lines; a last line cut short by a kill is left out. Missing file: empty list.

    Raises DamagedFile naming file and line for anything else that is not a JSON object.
    """
    if not path.exists():
        return []
    rows = []
    *lines, _ = path.read_bytes().split(b"\n")
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
        except ValueError as error:  # JSON and UTF-8 errors both are
            raise DamagedFile(f"{path} line {number} is not JSON: {error}") from error
        if not isinstance(row, dict):
            raise DamagedFile(f"{path} line {number} is not a JSON object: {line[:80]!r}")
        rows.append(row)
    return rows


def rewind(path: Path, last_step: int) -> int:
    """Keep rows up to ``last_step``; later ones move to ``*.superseded.jsonl``. Returns how many moved.

    After a crash a run goes on from its last checkpoint: steps after it are made again, and the curve must
    not show both.
    """
    rows = read_json_lines(path)
    later = [row for row in rows if row["step"] > last_step]
    if not later:
        return 0
    for row in later:
        append_json(path.with_suffix(".superseded.jsonl"), row)
    kept = "".join(json.dumps(row) + "\n" for row in rows if row["step"] <= last_step)
    write_text(path, kept)
    return len(later)


def write_text(path: Path, text: str) -> None:
    """Atomic: a reader sees the old file or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    with partial.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def _cut_partial_line(file: BinaryIO) -> None:
    end = file.seek(0, os.SEEK_END)
    if end == 0:
        return
    file.seek(end - 1)
    if file.read(1) == b"\n":
        return
    file.seek(0)
    file.truncate(file.read().rfind(b"\n") + 1)
    file.seek(0, os.SEEK_END)


def plain(value):
    """JSON-ready: arrays and scalars as numbers and lists, numbers that JSON cannot hold as None."""
    if isinstance(value, dict):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(v) for v in value]
    if hasattr(value, "tolist"):
        return plain(value.tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
