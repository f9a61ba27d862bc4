"""Checkpoints with the files that verl's FSDP engine writes; each holds one number."""

from __future__ import annotations

from pathlib import Path

import torch

from verl_credit.records.run.files import METRICS, append_json
from verl_credit.records.run.resume import DATA
from verl_credit.records.run.state import TRACKER


def write_actor(folder: Path, ranks: int = 1) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("model", "optim", "extra_state"):
        for rank in range(ranks):
            torch.save({"x": torch.ones(64)}, folder / f"{name}_world_size_{ranks}_rank_{rank}.pt")


def save_step(folder: Path, step: int, ranks: int = 1) -> Path:
    """A whole checkpoint of ``step`` in the folder of checkpoints, not named by the tracker."""
    place = folder / f"global_step_{step}"
    write_actor(place / "actor", ranks)
    torch.save({"x": 1}, place / DATA)
    return place


def saved_run(run_dir: Path, *steps: int, tracker: str | None = None, done: int | None = None) -> Path:
    """A run whose last step is the last of ``steps``; returns the folder of its checkpoints."""
    folder = run_dir / "checkpoints"
    folder.mkdir(parents=True)
    for step in steps:
        save_step(folder, step)
    for step in range(1, (max(steps, default=0) if done is None else done) + 1):
        append_json(run_dir / METRICS, {"step": step})
    if (said := str(max(steps, default="")) if tracker is None else tracker) != "absent":
        (folder / TRACKER).write_text(said)
    return folder
