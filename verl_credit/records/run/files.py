"""Files of a run: metrics as JSON lines, files that are replaced as a whole, and how many checkpoints there are."""

import json
import math
import os
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

METRICS = "metrics.jsonl"
VALIDATION = "validation.jsonl"
EVENTS = "events.jsonl"
STATE = "verl_credit_state.json"
VALUES = "turn_values.pt"


def append_json(path: Path, row: dict) -> None:
    """Append one line of ASCII JSON; numbers that JSON does not allow become null. An incomplete last line, left by a kill,
    is removed first."""
    path.parent.mkdir(parents=True, exist_ok=True)
    line = (json.dumps(plain(row)) + "\n").encode("ascii")
    with path.open("a+b") as file:  # every write is at the end, wherever the last read was
        if end := file.seek(0, os.SEEK_END):
            file.seek(end - 1)
            if file.read(1) != b"\n":
                file.seek(0)
                file.truncate(file.read().rfind(b"\n") + 1)
        file.write(line)


class DamagedFile(ValueError):
    """A file of a run cannot be read; the message names the line."""


def read_json_lines(path: Path) -> list[dict]:
    """All complete lines; a missing file gives an empty list. Raises DamagedFile, which names the line, for anything that
    is not a JSON object."""
    return GrowingFile(path).new_rows()


class GrowingFile:
    """A file of JSON lines that another process appends to: a read costs only the appended lines."""

    def __init__(self, path: Path):
        self._path = path
        self._lines, self._end, self._inode = 0, 0, None

    def new_rows(self) -> list[dict]:
        """The complete lines since the last call, or all lines at the first call. Raises the errors of ``read_json_lines``.

        A file that was replaced (``rewind``) is read from its beginning; as many lines as were read before are left out.
        """
        try:
            file = self._path.open("rb")
        except (FileNotFoundError, NotADirectoryError):
            return []
        with file:
            status = os.fstat(file.fileno())
            same = status.st_ino == self._inode and status.st_size >= self._end
            before, begin = (self._lines, self._end) if same else (0, 0)
            file.seek(begin)
            *lines, partial = file.read().split(b"\n")
            end = file.tell() - len(partial)
        rows = []
        for number, line in enumerate(lines, start=before + 1):
            try:
                row = json.loads(line) if line.strip() else None  # an editor's blank line stays counted
            except (ValueError, RecursionError) as error:  # JSON and UTF-8 errors are ValueErrors
                raise DamagedFile(f"{self._path} line {number} is not JSON: {error}") from error
            if line.strip() and not isinstance(row, dict):
                raise DamagedFile(f"{self._path} line {number} is not a JSON object: {line[:80]!r}")
            rows += [row] if number > self._lines else []
        self._lines, self._end, self._inode = before + len(lines), end, status.st_ino
        return [row for row in rows if row is not None]


def rewind(path: Path, last_step: int) -> int:
    """Keep rows up to ``last_step``; later rows move to ``*.superseded.jsonl``. Returns how many moved.

    After a crash a run continues from its last checkpoint and repeats the later steps, which the curve must show once.
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


@contextmanager
def replaced(path: Path) -> Iterator[BinaryIO]:
    """The file to write; it is renamed to ``path`` at the end, so that a reader sees the old file or the new one. Two
    processes may write the same file at the same time: each writes to its own partial file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        with partial.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> Path:
    with replaced(path) as file:
        file.write(text.encode("utf-8"))
    return path


def plain(value):
    """The value for JSON: arrays become lists and numbers, numbers that JSON does not allow become None."""
    if isinstance(value, dict):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(v) for v in value]
    if hasattr(value, "tolist"):
        return plain(value.tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def count_written(steps: int, save_every: int, named: Collection[int]) -> int:
    """The number of checkpoints that a run of ``steps`` writes; with ``save_every`` below 1 only the named steps."""
    regular = {*range(save_every, steps, save_every), steps} if save_every > 0 else set()
    return len(regular | {step for step in named if step <= steps})


def count_kept(steps: int | None, save_every: int, most: int | None, named: Collection[int]) -> int | None:
    """The number of checkpoints at the end; None when all are kept and the number of steps is not known.

    ``most`` bounds the unnamed checkpoints (``trainer.max_actor_ckpt_to_keep``); None: no bound.
    """
    bounds = []
    if steps:
        bounds.append(count_written(steps, save_every, named))
    if most is not None or save_every < 1:
        bounds.append(len(named) + (most or 0 if save_every > 0 else 0))
    return min(bounds, default=None)
