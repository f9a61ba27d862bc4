"""The policy that `verl-credit evaluate` starts, with its configuration: a step of a run, or a model with a recipe."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from omegaconf import DictConfig

from verl_credit.cli.saved_run import CONFIG, saved_step, steps_of
from verl_credit.errors import PreflightError
from verl_credit.recipe.compose import quoted, unchecked_config
from verl_credit.recipe.world import DATA
from verl_credit.records.run.resume import STEP
from verl_credit.records.run.validation import EVALUATION


@dataclass(frozen=True)
class Policy:
    """``checkpoint``: None for a model and for step 0, the model that a run starts from. ``run_dir``: None for a model."""

    name: str
    config: DictConfig
    step: int = 0
    checkpoint: Path | None = None
    run_dir: Path | None = None

    @property
    def folder(self) -> Path:
        """The folder of the evaluation, unless the user names another: a new one beside those of other data."""
        home = (Path("runs") if self.run_dir is None else self.run_dir.parent) / "evaluations"
        folders = (home / (f"{self.name}-{n}" if n > 1 else self.name) for n in count(1))
        return next(folder for folder in folders if not (folder / EVALUATION).exists())


def find_policy(
    target: str, step: int | None, recipe: str | None, config_dir: str | None, overrides: Sequence[str]
) -> Policy:
    """``overrides`` are of the ``recipe``; those of a run are left to its new start. Raises PreflightError, ConfigError."""
    folder = Path(target).expanduser()
    if (folder / CONFIG).is_file() or STEP.fullmatch(folder.name):
        if recipe is not None:
            raise PreflightError(f"--config-name {recipe}: expected with a model; a run has its own")
        return _of_run(folder.resolve(), step)
    if step is not None:
        raise PreflightError(f"--step {step}: expected with a run's folder, which has a {CONFIG}")
    if folder.exists() and not (folder / "config.json").is_file():
        raise PreflightError(f"expected a run ({CONFIG}), its checkpoint, or a model's folder (config.json)")
    if not folder.exists() and target.startswith(("/", ".", "~")):
        raise PreflightError("no such folder; expected a run's, a model's, or a model's name on the hub")
    if recipe is None:
        raise PreflightError("a model needs --config-name RECIPE, which has the tools and the engine")
    model = str(folder.resolve()) if folder.exists() else target
    given = [f"actor_rollout_ref.model.path={quoted(model)}", *overrides]
    config = unchecked_config(recipe, given, config_dir, may_fetch=True, set_later=DATA)
    return Policy(model.strip("/").rpartition("/")[2], config)


def _of_run(folder: Path, step: int | None) -> Policy:
    if not STEP.fullmatch(folder.name):
        (saved,) = steps_of(folder, None if step is None else [step])
    elif step is None:
        saved = saved_step(folder)
    else:
        raise PreflightError(f"--step {step}: expected with the folder of the run")
    name, checkpoint = f"{saved.run_dir.name}-step-{saved.step}", saved.folder if saved.step else None
    return Policy(name, saved.config, saved.step, checkpoint, saved.run_dir)
