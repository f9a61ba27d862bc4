"""A* of the turns that the lens shows, where `verl-credit fidelity lens` measured it."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from verl_credit.records.report.numbers import plain, signed
from verl_credit.records.run.files import DamagedFile, read_json_lines


@dataclass(frozen=True)
class Stars:
    """``shown[row, turn]``: A* ± its standard error. ``problem``: why there is none although there is a file."""

    shown: dict[tuple[int, int], str] = field(default_factory=dict)
    problem: str = ""


def stars_folder(run_dir: Path, step: int) -> Path:
    return Path(run_dir) / "fidelity" / f"lens_step_{step}"


def stars_path(run_dir: Path, step: int) -> Path:
    """A line for each turn."""
    return stars_folder(run_dir, step) / "turns.jsonl"


def text_digest(texts: Sequence[str]) -> str:
    """Of what a rollout wrote, by token: a step that was made again has other rollouts in the same rows."""
    return hashlib.blake2b("\0".join(texts).encode("utf-8", "replace"), digest_size=12).hexdigest()


def read_stars(run_dir: Path, step: int, columns: Mapping[str, list[Any]]) -> Stars:
    """``columns``: of the step's table of tokens."""
    path = stars_path(run_dir, step)
    try:
        lines = read_json_lines(path)
        written = {row: text_digest(text) for row, text in zip(columns["row"], columns["text"], strict=True)}
        if any(written.get(line["row"]) != line["text"] for line in lines):
            return Stars(
                problem=f"{path} is of other rollouts of step {step}: measure again (verl-credit fidelity lens)."
            )
        return Stars(
            {(line["row"], line["turn"]): f"{signed(line['a_star'])} ± {plain(line['se'])}" for line in lines}
        )
    except (DamagedFile, KeyError, TypeError) as error:
        return Stars(problem=f"{path} cannot be read: {type(error).__name__}: {error}.")
