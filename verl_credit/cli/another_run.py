"""Starts a run in its own folder with the configuration and a checkpoint of another run, which is only read and may still be
going; and makes rollouts of a saved policy for the entropy probe: verl's trainer resumes for one more step.

The run's configuration, engine and reward make the rollouts, so the run's next step could have made them.
"""

import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from verl_credit.cli.command import ChildFailed
from verl_credit.cli.saved_run import SavedStep, saved_step
from verl_credit.config.resolved import flat_values
from verl_credit.config.settings import CreditSettings
from verl_credit.errors import ConfigError, ExitCode, IntegrityError, PreflightError
from verl_credit.recipe.compose import load_config
from verl_credit.recipe.world import missing_line, serves_search
from verl_credit.records.run.lock import holder_is_gone
from verl_credit.records.run.state import planned_steps
from verl_credit.records.run.table_files import ROLLOUTS, table_path
from verl_credit.study.campaign.child import Children, run_command

RECIPE, LOG = "another_run", "train.log"


def own_folder(folder: Path, checkpoint: Path | None) -> dict:
    """The keys of a run that writes only into ``folder``, evaluates nothing and resumes the linked ``checkpoint``."""
    return {
        "run_dir": str(folder),
        "keep_checkpoints": [],
        "max_hours": None,
        "credit_preset": None,
        "lineage.dir": str(folder / "lineage"),
        "lineage.exp_id": None,
        "lineage.parent": None,
        "trainer.default_local_dir": str(folder / "checkpoints"),
        "trainer.default_hdfs_dir": None,
        "trainer.rollout_data_dir": None,
        "trainer.validation_data_dir": None,
        "trainer.max_actor_ckpt_to_keep": None,
        "trainer.test_freq": -1,
        "trainer.val_before_train": False,
        "trainer.val_only": False,
        "trainer.logger": ["console"],
        "trainer.resume_mode": "resume_path" if checkpoint else "disable",
        "trainer.resume_from_path": str(_linked(folder, checkpoint)) if checkpoint else None,
        "trainer.del_local_ckpt_after_load": False,
        "global_profiler.steps": None,
    }


def _linked(folder: Path, checkpoint: Path) -> Path:
    return folder / "from" / checkpoint.name


@contextmanager
def new_folder(folder: Path, result: Path, *others: Path) -> Iterator[None]:
    """Makes the folder of a run; a refusal removes it. Raises PreflightError for a folder inside ``others``, which are
    another run's, and for a folder that is not empty, unless an earlier try left no ``result`` in it and has ended."""
    if any(map(folder.is_relative_to, others)):
        raise PreflightError(f"{folder} belongs to the run in {others[0]}, which stays as it is")
    if (folder / f"{RECIPE}.yaml").is_file() and not result.exists() and holder_is_gone(folder):
        shutil.rmtree(folder)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise PreflightError(f"{folder} is not empty; give a new folder")
    folder.mkdir(parents=True, exist_ok=True)
    try:
        yield
    except (ConfigError, PreflightError):
        shutil.rmtree(folder)
        raise


def compose_run(
    folder: Path, config: DictConfig, fixed: Mapping, overrides: Sequence[str], checkpoint: Path | None = None
) -> DictConfig:
    """Writes the other run's configuration as a recipe into ``folder``; keys newer than the run have their defaults.

    ``checkpoint`` is linked, but for its data loader's state, which does not fit another batch size. Raises ConfigError for
    an override of a key in ``fixed``, and for a secret that is missing, because runs store none."""
    _check_overrides(overrides, fixed, config)
    if checkpoint is not None:
        there = _linked(folder, checkpoint)
        there.mkdir(parents=True)
        for path in checkpoint.iterdir():
            if path.name != "data.pt":
                (there / path.name).symlink_to(path)
    recipe = OmegaConf.create({"defaults": ["ppo_trainer", "credit_defaults", "_self_"]})
    recipe = OmegaConf.merge(recipe, config)
    for key, value in fixed.items():
        OmegaConf.update(recipe, key, value, force_add=True)
    if serves_search(config):  # the server of the other run has ended; the new run starts its own
        recipe.search.url = None
    OmegaConf.save(recipe, folder / f"{RECIPE}.yaml")
    composed = load_config(RECIPE, overrides, str(folder))
    if missing := missing_line(composed):
        raise PreflightError(missing)
    return composed


def _check_overrides(overrides: Sequence[str], fixed: Mapping, config: DictConfig) -> None:
    keys = {text.lstrip("+~").partition("=")[0]: text for text in overrides}
    for key, text in keys.items():
        if taken := [name for name in fixed if name == key or name.startswith(f"{key}.")]:
            raise ConfigError(f"{text}: {taken[0]} is set by this command and cannot be overridden")
    for key, value in flat_values(config).items():
        hidden = "***" in str(value)  # a run's file has the value without its secret
        if hidden and key not in keys and not (key == "search.url" and serves_search(config)):
            use = "a run stores no passwords; give it with an override"
            raise ConfigError(key=key, value=value, accepted=use)


def run_alone(folder: Path, overrides: Sequence[str], otherwise: str) -> None:
    """Trains in a process of its own, so that Ray and verl start afresh. Raises PreflightError where it is refused,
    ChildFailed or IntegrityError where it fails, with ``otherwise`` and the end of its output, and KeyboardInterrupt."""
    log = folder / LOG
    with Children() as children:
        children.start("", run_command("train", RECIPE, overrides, str(folder)), log)
        _, code = children.wait()
    if children.stopped or code == ExitCode.INTERRUPTED:
        raise KeyboardInterrupt
    if code != ExitCode.DONE:
        lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
        last = lines[-1:] if code == ExitCode.PREFLIGHT else lines[-8:]
        errors = {ExitCode.PREFLIGHT: PreflightError, ExitCode.INTEGRITY: IntegrityError}
        text = "\n".join([f"{otherwise}: it ended with exit code {code} ({log}):", *last])
        raise errors.get(code, ChildFailed)(text)


def collect(
    checkpoint: Path, folder: Path, *, prompts: int, overrides: Sequence[str] = (), save: bool = False
) -> Path:
    """The parquet file with the rollouts of ``prompts`` prompts (`records.run.tables.ROLLOUTS`), in the new ``folder``.

    The step makes one update with all rollouts; ``save`` keeps the updated policy, in ``folder``/checkpoints. Prompts are
    the first of the run's data in the order of ``data.seed``: each at most once, and the same at every call. In the run's
    resolved configuration a key no longer follows another key. Raises RuntimeError where the step fails.
    """
    saved, folder = saved_step(Path(checkpoint)), Path(folder).expanduser().resolve()
    if prompts < 1:  # `train` checks that the files have enough rows
        raise ConfigError(key="prompts", value=prompts, accepted="expected at least 1")
    if 0 < (most := saved.config.data.get("train_max_samples") or -1) < prompts:
        use = "no prompt is taken twice; ask for fewer, or let the data have more"
        raise ConfigError(key="prompts", value=prompts, beside={"data.train_max_samples": most}, accepted=use)
    fixed = {  # the run makes one step
        **own_folder(folder, saved.folder),
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
    path = table_path(folder, ROLLOUTS, saved.step + 1)
    with new_folder(folder, path, saved.run_dir, saved.folder.parent):
        config = compose_run(folder, saved.config, fixed, overrides, saved.folder)
        frozen = _frozen_curriculum(config, saved)
    run_alone(folder, [*overrides, *frozen], "no rollouts")
    if not path.exists():
        raise RuntimeError(f"step {saved.step + 1} left no rollout that counts; {folder / LOG} says more")
    return path


def _frozen_curriculum(config: DictConfig, saved: SavedStep) -> list[str]:
    """Fixes the weights that the run would have had in this step, because they depend on the number of steps."""
    curriculum = config.algorithm.info_gain_curriculum
    if all(ends[0] == ends[1] for ends in curriculum.values()):
        return []
    steps = saved.config.trainer.total_training_steps or planned_steps(saved.folder, saved.config)
    if steps is None:
        raise PreflightError(f"{saved.folder} lacks the number of steps, which the curriculum follows")
    weights = CreditSettings.from_config(config).curriculum_at(saved.step + 1, steps)
    named = zip(("gain", "outcome"), weights, strict=True)
    return [f"algorithm.info_gain_curriculum.{name}=[{weight},{weight}]" for name, weight in named]
