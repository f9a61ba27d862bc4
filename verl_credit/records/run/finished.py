"""How far a run goes and what it leaves, without verl: its time limit, its checkpoints, whether a start has work to do."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from omegaconf import DictConfig

from verl_credit.records.run.files import VALIDATION, read_json_lines
from verl_credit.records.run.state import planned_steps

TRACKER = "latest_checkpointed_iteration.txt"  # verl's; names the last complete checkpoint


def nothing_left(config: DictConfig) -> str | None:
    """Why a start of this run would make no step and no evaluation; None when it would.

    Only for ``trainer.resume_mode=auto``. The number of steps is ``trainer.total_training_steps`` or, with epochs, the
    checkpoint's. A run that was killed before its last evaluation is not finished.
    """
    trainer = config.trainer
    folder = Path(trainer.default_local_dir)
    step = last_checkpoint(folder) if trainer.resume_mode == "auto" else None
    if step is None:
        return None
    total, key = trainer.total_training_steps, "total_training_steps"
    if total is None:
        total, key = trainer.total_epochs, "total_epochs"
    end = planned_in_all(config)
    if end is None or step < end:
        return None
    evaluated = {row.get("step") for row in read_json_lines(Path(config.run_dir) / VALIDATION)}
    if trainer.get("val_before_train", True) and step not in evaluated:
        return None
    return (
        f"nothing left to learn: the checkpoint in {trainer.default_local_dir} is at step {step} of "
        f"trainer.{key}={total}; raise that number, or give another run_dir"
    )


def planned_in_all(config: DictConfig) -> int | None:
    """Steps of the whole run; with epochs None until a checkpoint has the number."""
    folder, total = Path(config.trainer.default_local_dir), config.trainer.total_training_steps
    if total is None and (step := last_checkpoint(folder)) is not None:
        total = planned_steps(folder / f"global_step_{step}", config)
    return total


def last_checkpoint(folder: Path) -> int | None:
    """Step of the checkpoint that a resume would load; None without one."""
    try:
        step = int((folder / TRACKER).read_text())
    except (OSError, ValueError):
        return None
    return step if (folder / f"global_step_{step}").is_dir() else None


class TimeLimit:
    """Decides after every step whether the next one must be the last.

    It must be when two more would not fit: elapsed + 2 s + tail > limit, with s the longest step so far and tail the
    longest saving plus the longest evaluation so far (s each until the first). A run ends within its limit unless its last
    step takes a whole step longer than all before. Seconds, except `hours`; `clock` is for tests.
    """

    def __init__(self, hours: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit_s, self._clock, self._start = hours * 3600.0, clock, clock()
        self._longest: dict[str, float] = {}

    def next_is_last(self, timing_s: dict[str, float]) -> bool:
        """`timing_s`: seconds of the step that has ended: "step" (saving included), "save_checkpoint", "testing"."""
        for name, seconds in timing_s.items():
            self._longest[name] = max(seconds, self._longest.get(name, 0.0))
        step = self._longest["step"]
        tail = self._longest.get("save_checkpoint", step) + self._longest.get("testing", step)
        return self._clock() - self._start + 2 * step + tail > self._limit_s
