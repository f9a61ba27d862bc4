"""Evaluates a policy with verl's trainer, in a run of its own that makes no step (`trainer.val_only`)."""

from collections.abc import Sequence
from pathlib import Path

from omegaconf import DictConfig

from verl_credit.cli.another_run import LOG, compose_run, new_folder, own_folder, run_alone
from verl_credit.cli.evaluate.policy import Policy
from verl_credit.errors import IntegrityError, PreflightError
from verl_credit.records.run.validation import EVALUATION, read_held_out

ROWS_AT_ONCE = 1024
"""verl begins all rows of a held-out batch at once: of 4,096 on two cores half waited longer than search.timeout_s."""


def evaluate_policy(
    policy: Policy, folder: Path, *, data: Sequence[Path], samples: int, overrides: Sequence[str] = ()
) -> list[dict]:
    """The rows of `host.step.held_out.held_out_rows`: every question greedily, and ``samples`` times at temperature 1.
    Raises PreflightError, ConfigError, ChildFailed and IntegrityError."""
    config, files = policy.config.copy(), list(map(str, data))
    config.data.val_max_samples = -1
    config.data.val_batch_size = config.data.get("val_batch_size") or max(1, ROWS_AT_ONCE // max(samples, 1))
    trainer = config.trainer
    prompts = int(trainer.nnodes) * int(trainer.n_gpus_per_node)  # verl divides a batch among the devices
    fixed = {
        **own_folder(folder, policy.checkpoint),
        "data.val_files": files,
        # Nothing is trained, but verl's trainer needs training data.
        "data.train_files": files,
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
    with new_folder(folder, folder / EVALUATION, *([policy.run_dir] if policy.run_dir else [])):
        compose_run(folder, config, fixed, overrides, policy.checkpoint)
    run_alone(folder, overrides, "no evaluation")
    if not (rows := read_held_out(folder, policy.step)):
        raise IntegrityError(f"the evaluation wrote no trajectory; {folder / LOG} says more")
    return rows


def data_files(given: Sequence[Path], config: DictConfig) -> list[Path]:
    """``given``, or the held-out files of the configuration. Raises PreflightError for a file that is not there."""
    named = config.data.get("val_files") or []
    files = list(given) or [Path(one) for one in ([named] if isinstance(named, str) else named)]
    if not files:
        raise PreflightError("--data: expected parquet files, because data.val_files names none")
    files = [file.expanduser().resolve() for file in files]
    if missing := next((file for file in files if not file.is_file()), None):
        raise PreflightError(f"--data {missing}: no such file; `verl-credit prepare` writes one")
    return files
