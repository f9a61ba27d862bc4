"""Makes rollouts of a saved policy for the entropy probe: resumes verl's trainer from the checkpoint for one more step.

The run's configuration, engine and reward make the rollouts, so the run's next step could have made them. They are written
to a separate folder; the run that saved the checkpoint is only read, and may still be going.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from omegaconf import DictConfig

from verl_credit.cli.probe.another_run import (
    LOG,
    RECIPE,
    check_overrides,
    link_checkpoint,
    own_folder,
    resumed,
    run_alone,
    write_recipe,
)
from verl_credit.cli.saved_run import SavedStep, saved_step
from verl_credit.config.settings import CreditSettings
from verl_credit.errors import ConfigError, PreflightError
from verl_credit.recipe.compose import load_config
from verl_credit.records.run.lock import holder_is_gone
from verl_credit.records.run.state import planned_steps
from verl_credit.records.run.tables import ROLLOUTS, table_path, tables_of


def collect(
    checkpoint: Path, folder: Path, *, prompts: int, overrides: Sequence[str] = (), save: bool = False
) -> Path:
    """The parquet file with the rollouts of ``prompts`` prompts (`records.run.tables.ROLLOUTS`), in the new ``folder``
    (or one in which an earlier try failed).

    ``checkpoint``: RUN/global_step_N or RUN/checkpoints/global_step_N. The step makes one update with all rollouts;
    ``save`` keeps the updated policy, in ``folder``/checkpoints/global_step_{N+1}. Prompts are the first of the run's data
    in the order of ``data.seed``: each at most once, and the same at every call. ``overrides``: Hydra's, of the run's
    resolved configuration, in which a key no longer follows another key.
    Raises PreflightError and ConfigError for what is refused, RuntimeError where the step fails (the message has the end of
    ``folder``/train.log), KeyboardInterrupt where a signal stopped it.
    """
    saved, folder = saved_step(Path(checkpoint)), Path(folder).expanduser().resolve()
    _check_folder(folder, saved)
    _check_prompts(prompts, saved.config)
    fixed = _fixed(folder, saved, prompts, save)
    check_overrides(overrides, fixed, saved.config, "the probe")
    link_checkpoint(saved.folder, folder)
    write_recipe(folder, saved.config, fixed)
    try:
        config = load_config(RECIPE, overrides, str(folder))
        frozen = _frozen_curriculum(config, saved)
    except (ConfigError, PreflightError):
        shutil.rmtree(folder)  # it was empty, so the next try may use it again
        raise
    run_alone(folder, [*overrides, *frozen], "no rollouts")
    path = table_path(folder, ROLLOUTS, saved.step + 1)
    if not path.exists():
        raise RuntimeError(f"step {saved.step + 1} left no rollout that counts; {folder / LOG} says more")
    return path


def _check_folder(folder: Path, saved: SavedStep) -> None:
    if folder.is_relative_to(saved.run_dir) or folder.is_relative_to(saved.folder.parent):
        raise PreflightError(
            f"{folder} belongs to the run in {saved.run_dir}, which stays as it is; give another folder"
        )
    failed = (folder / f"{RECIPE}.yaml").is_file() and not tables_of(folder, ROLLOUTS)
    if failed and holder_is_gone(folder):
        shutil.rmtree(folder)  # it holds an earlier, failed try
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise PreflightError(f"{folder} is not empty; give a new folder for the rollouts")


def _check_prompts(prompts: int, config: DictConfig) -> None:
    """Checks the number of prompts; `train` checks that the files have enough rows."""
    if prompts < 1:
        raise ConfigError(key="prompts", value=prompts, accepted="expected at least 1")
    if 0 < (most := config.data.get("train_max_samples") or -1) < prompts:
        raise ConfigError(
            key="prompts",
            value=prompts,
            beside={"data.train_max_samples": most},
            accepted="no prompt is taken twice; ask for fewer, or let the data have more",
        )


def _fixed(folder: Path, saved: SavedStep, prompts: int, save: bool) -> dict:
    """The keys that restrict the run to a step in its own folder; none can be overridden."""
    return {
        **own_folder(folder),
        **resumed(folder, saved.folder),
        "keep_rollouts.steps": 1,
        "keep_rollouts.groups": None,
        "data.train_batch_size": prompts,
        "data.gen_batch_size": None,
        "actor_rollout_ref.actor.ppo_mini_batch_size": prompts,
        "actor_rollout_ref.actor.ppo_epochs": 1,
        "critic.ppo_mini_batch_size": prompts,
        "trainer.total_training_steps": saved.step + 1,
        "trainer.total_epochs": saved.step + 2,  # an epoch may be a single step with this batch size
        "trainer.save_freq": 1 if save else -1,
    }


def _frozen_curriculum(config: DictConfig, saved: SavedStep) -> list[str]:
    """Fixes the weights that the run would have had in this step, because they depend on the number of steps."""
    curriculum = config.algorithm.info_gain_curriculum
    if all(ends[0] == ends[1] for ends in curriculum.values()):
        return []
    steps = saved.config.trainer.total_training_steps or planned_steps(saved.folder, saved.config)
    if steps is None:
        raise PreflightError(
            f"{saved.folder} does not say how many steps the run has, which its curriculum follows"
        )
    weights = CreditSettings.from_config(config).curriculum_at(saved.step + 1, steps)
    return [
        f"algorithm.info_gain_curriculum.{name}=[{weight},{weight}]"
        for name, weight in zip(("gain", "outcome"), weights, strict=True)
    ]
