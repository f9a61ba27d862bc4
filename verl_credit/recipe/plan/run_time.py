"""Seconds of a whole run: steps, evaluations and checkpoints."""

from __future__ import annotations

from dataclasses import dataclass, replace

from verl_credit.recipe.plan.compute import checkpoint_bytes, rollout_seconds
from verl_credit.recipe.plan.hardware import GB, Hardware
from verl_credit.recipe.plan.job import Assumptions, Job
from verl_credit.recipe.plan.memory import Engine
from verl_credit.recipe.plan.model_shape import ModelShape
from verl_credit.records.run.finished import count_written


@dataclass(frozen=True)
class RunTime:
    """The seconds of ``steps`` steps. ``evaluation`` is None, and not counted, without a number of held-out questions."""

    steps: int
    training: float
    evaluations: int
    evaluation: float | None
    saves: int
    save: float

    @property
    def total(self) -> float:
        return self.training + self.evaluations * (self.evaluation or 0.0) + self.saves * self.save


def run_time(
    shape: ModelShape,
    job: Job,
    hw: Hardware,
    assumed: Assumptions,
    runner: Engine,
    steps: int,
    step_seconds: float,
) -> RunTime:
    """An evaluation generates once per question, mode and sample. verl also evaluates and saves at the last step."""
    questions = job.val_rows or int(assumed.val_rows)
    evaluation = None
    if questions:
        held_out = replace(job, prompts=questions * job.val_samples, rollouts=1)
        evaluation = job.val_modes * sum(rollout_seconds(shape, held_out, hw, assumed, runner).values())
    return RunTime(
        steps=steps,
        training=steps * step_seconds,
        evaluations=job.val_first + _times(steps, job.test_every),
        evaluation=evaluation,
        saves=count_written(steps, job.save_every, job.named),
        save=checkpoint_bytes(shape, job) / (assumed.disk_gb_s * GB),
    )


def _times(steps: int, every: int) -> int:
    return -(-steps // every) if every > 0 else 0
