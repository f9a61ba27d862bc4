"""A part's results beside its predictions, in a JSON file that is complete after every row.

A row: ``name``; ``found`` and ``predicted``, {quantity: value}; ``source`` of the prediction; ``verdict``: ok, off, found
(without a prediction), or not run; optionally ``why``. The file also names the machine and the code, and the part's
``state``: running, done, cut (at its time limit), failed, not run.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

OK, OFF, FOUND, NOT_RUN = "ok", "off", "found", "not run"
MAX_ROWS, MAX_TEXT = 400, 400


@dataclass(frozen=True)
class Expected:
    """A prediction as text, and the test whether a value meets it."""

    text: str
    met: Callable[[object], bool]


def at_most(limit: float) -> Expected:
    return Expected(f"at most {limit:.4g}", lambda value: value <= limit)  # NaN is not


def at_least(limit: float) -> Expected:
    return Expected(f"at least {limit:.4g}", lambda value: value >= limit)


def about(value: float, share: float) -> Expected:
    """Within ``share`` of ``value`` to both sides."""
    return Expected(f"{value:.4g} within {share:.0%}", lambda found: abs(found - value) <= share * abs(value))


def within_factor(value: float, factor: float) -> Expected:
    return Expected(
        f"{value:.4g}, or up to {factor:g} times more or less",
        lambda x: value / factor <= x <= value * factor,
    )


def same(value) -> Expected:
    return Expected(str(value), lambda found: found == value)


def read(path: Path) -> dict | None:
    """A part's file, or None if it is missing or cannot be read."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) and isinstance(content.get("rows"), list) else None


def write(path: Path, content: Mapping) -> None:
    """Write the file atomically: a reader sees the old file or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    with partial.open("w", encoding="utf-8") as file:
        file.write(json.dumps(content, indent=1, ensure_ascii=False) + "\n")
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


class Record:
    """The rows of one part. Each is written to the file when it is added; rows of an earlier try are kept."""

    def __init__(self, path: Path):
        self.path = path
        self.content = read(path) or {"rows": []}

    def has(self, name: str) -> bool:
        """Whether an earlier try has this row already. Rows that were off or not run are tried again."""
        return any(row["name"] == name and row["verdict"] in (OK, FOUND) for row in self.content["rows"])

    def add(
        self,
        name: str,
        found: Mapping[str, object],
        predicted: Mapping[str, Expected] | None = None,
        source: str = "",
        why: str = "",
    ) -> dict:
        """Add a row. It is ``off`` when a prediction is not met, or a predicted value is missing."""
        predicted = predicted or {}
        missing = [key for key in predicted if found.get(key) is None]
        met = not missing and all(expected.met(found[key]) for key, expected in predicted.items())
        return self._put({
            "name": name, "found": {key: _plain(value) for key, value in found.items()},
            "predicted": {key: expected.text for key, expected in predicted.items()},
            "source": source, "verdict": (OK if met else OFF) if predicted else FOUND,
            **({"why": why or f"not found: {', '.join(missing)}"} if why or missing else {}),
        })  # fmt: skip

    def off(self, name: str, error: Exception | str) -> dict:
        """Add a row that ended in an error."""
        why = error if isinstance(error, str) else f"{type(error).__name__}: {error}"
        return self._put(
            {"name": name, "found": {}, "predicted": {}, "source": "", "verdict": OFF, "why": why}
        )

    def not_run(self, name: str, why: str) -> dict:
        return self._put(
            {"name": name, "found": {}, "predicted": {}, "source": "", "verdict": NOT_RUN, "why": why}
        )

    def _put(self, row: dict) -> dict:
        row = _clipped(row)
        rows = [old for old in self.content["rows"] if old["name"] != row["name"]]
        if len(rows) >= MAX_ROWS:
            raise RuntimeError(f"{self.path}: more than {MAX_ROWS} rows")
        self.content["rows"] = [*rows, row]
        write(self.path, self.content)
        print(line(row), flush=True)
        return row


def line(row: Mapping) -> str:
    text = f"  {row['verdict']:<7}  {row['name']}"
    text += f": {values(row['found'])}" if row["found"] else ""
    text += f"; predicted {values(row['predicted'])}" if row["predicted"] else ""
    return text + (f"; {row['why']}" if row.get("why") else "")


def values(of: Mapping[str, object]) -> str:
    return ", ".join(f"{key} {_shown(value)}" for key, value in of.items())


def _shown(value) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _plain(value):
    """The value for JSON: numbers rounded to six digits, None for those that are not finite."""
    if hasattr(value, "item"):
        value = value.item()
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    return value if isinstance(value, (bool, int, str, type(None))) else str(value)


def _clipped(value):
    if isinstance(value, dict):
        return {key: _clipped(item) for key, item in value.items()}
    if isinstance(value, str):
        value = " ".join(value.split())
        return value if len(value) <= MAX_TEXT else value[: MAX_TEXT - 1] + "…"
    return value
