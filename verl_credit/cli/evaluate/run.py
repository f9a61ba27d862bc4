"""Evaluates a policy with verl's trainer, in a run of its own that makes no step (`trainer.val_only`)."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from omegaconf import DictConfig, ListConfig

from verl_credit.cli.another_run import (
    RECIPE,
    check_overrides,
    link_checkpoint,
    own_folder,
    resumed,
    run_alone,
    write_recipe,
)
from verl_credit.cli.evaluate.policy import Policy
from verl_credit.errors import ConfigError, IntegrityError, PreflightError
from verl_credit.recipe.compose import load_config
from verl_credit.recipe.world import missing_line
from verl_credit.records.run.lock import holder_is_gone
from verl_credit.records.run.validation import EVALUATION, read_held_out

DATA = "data.val_files"
ROWS_AT_ONCE = 1024
"""verl begins all rows of a held-out batch at once: of 4,096 on two cores half waited longer than search.timeout_s."""


def evaluate_policy(
    policy: Policy, folder: Path, *, data: Sequence[Path], samples: int, overrides: Sequence[str] = ()
) -> list[dict]:
    """The rows of `host.step.held_out.held_out_rows`: every question greedily, and ``samples`` times at temperature 1.

    ``folder``: new, or one in which an earlier try failed. ``overrides``: Hydra's, of a run's resolved configuration.
    Raises PreflightError and ConfigError for what is refused, ChildFailed and IntegrityError where the evaluation fails.
    """
    fixed = _fixed(policy, folder, list(map(str, data)), samples)
    check_overrides(overrides, fixed, policy.config, "the evaluation")
    _check_folder(folder, policy)
    folder.mkdir(parents=True, exist_ok=True)
    if policy.checkpoint is not None:
        link_checkpoint(policy.checkpoint, folder)
    at_once = policy.config.data.get("val_batch_size") or max(1, ROWS_AT_ONCE // max(samples, 1))
    write_recipe(folder, policy.config, fixed | {"data.val_max_samples": -1, "data.val_batch_size": at_once})
    try:
        if missing := missing_line(load_config(RECIPE, overrides, str(folder))):
            raise PreflightError(missing)
    except (ConfigError, PreflightError):
        shutil.rmtree(folder)  # it was empty, so the next try may use it again
        raise
    run_alone(folder, overrides, "no evaluation")
    if not (rows := read_held_out(folder, policy.step)):
        raise IntegrityError(f"the evaluation wrote no trajectory; {folder / 'train.log'} says more")
    return rows


def data_files(given: Sequence[Path], config: DictConfig) -> list[Path]:
    """``given``, or the held-out files of the configuration. Raises PreflightError for a file that is not there."""
    files = list(given)
    if not files:
        named = config.data.get("val_files")
        files = [Path(one) for one in (named if isinstance(named, ListConfig) else [named] if named else [])]
    if not files:
        raise PreflightError(f"--data: expected parquet files with questions, because {DATA} names none")
    files = [file.expanduser().resolve() for file in files]
    for file in files:
        if not file.is_file():
            raise PreflightError(f"--data {file}: no such file; `verl-credit prepare` writes one")
    return files


def _check_folder(folder: Path, policy: Policy) -> None:
    if policy.run_dir is not None and folder.is_relative_to(policy.run_dir):
        raise PreflightError(f"--out {folder} belongs to the run in {policy.run_dir}, which stays as it is")
    if (
        (folder / f"{RECIPE}.yaml").is_file()
        and not (folder / EVALUATION).exists()
        and holder_is_gone(folder)
    ):
        shutil.rmtree(folder)  # it holds an earlier try, which failed
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise PreflightError(f"--out {folder} is not empty; give a new folder for the evaluation")


def _fixed(policy: Policy, folder: Path, data: list[str], samples: int) -> dict:
    """The keys that make a run an evaluation; none can be overridden."""
    trainer = policy.config.trainer
    prompts = int(trainer.nnodes) * int(trainer.n_gpus_per_node)  # verl divides a batch among the devices
    start = {"trainer.resume_mode": "disable", "trainer.resume_from_path": None}
    return {
        **own_folder(folder),
        **(start if policy.checkpoint is None else resumed(folder, policy.checkpoint)),
        DATA: data,
        # Nothing is trained, but verl's trainer needs training data.
        "data.train_files": data,
        "data.train_max_samples": -1,
        "data.train_batch_size": prompts,
        "data.gen_batch_size": None,
        "actor_rollout_ref.actor.ppo_mini_batch_size": prompts,
        "critic.ppo_mini_batch_size": prompts,
        "trainer.v1.separate_async.parameter_sync_step": "auto",
        "probe.every": 0,
        "actor_rollout_ref.rollout.val_kwargs.n": max(samples, 1),
        "evaluation.modes": ["greedy", "sampled"] if samples else ["greedy"],
        "evaluation.keep_trajectories": True,
        "evaluation.max_hours": None,
        "trainer.val_only": True,
        "trainer.val_before_train": True,
        "trainer.save_freq": -1,
        "trainer.total_training_steps": policy.step + 1,
        "trainer.total_epochs": policy.step + 2,
    }
