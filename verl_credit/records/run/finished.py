"""Decides from a run's files, without verl, whether the run is finished."""

from __future__ import annotations

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
    """Steps of the whole run; with epochs None until a checkpoint says how many they are."""
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
