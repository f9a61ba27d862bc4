"""Reads a run's saved configuration and checkpoints. The run may still be going."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from verl_credit.config.gone import KEYS, place_now
from verl_credit.config.resolved import leaves
from verl_credit.errors import ConfigError, PreflightError
from verl_credit.records.run import resume
from verl_credit.records.run.resume import STEP
from verl_credit.records.run.state import last_checkpoint

CONFIG = "config.yaml"


@dataclass(frozen=True)
class SavedStep:
    """Step ``step`` of the run in ``run_dir``, saved in ``folder``."""

    run_dir: Path
    folder: Path
    step: int
    config: DictConfig


def run_config(folder: Path) -> DictConfig:
    """Reads a run's resolved configuration. Raises ConfigError where it is absent or damaged."""
    path = folder / CONFIG
    if not path.is_file():
        raise ConfigError(f"{folder}: no {CONFIG} there; a run writes it when it starts")
    try:
        config = OmegaConf.load(path)
    except (YAMLError, OmegaConfBaseException, OSError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{path} cannot be read: {' '.join(str(error).split())[:300]}") from error
    if not isinstance(config, DictConfig):
        raise ConfigError(f"{path} holds no keys; expected a run's resolved configuration")
    # An earlier version wrote all of its keys; a value that switched on what is gone is still refused.
    for key in KEYS:
        parent, _, name = key.rpartition(".")
        section = OmegaConf.select(config, parent) if parent else config
        if isinstance(section, DictConfig):
            section.pop(name, None)
    for key, value in leaves(OmegaConf.to_container(config)):
        if isinstance(value, str) and (now := place_now(value)) != value:
            OmegaConf.update(config, key, now)
    return config


def saved_step(checkpoint: Path) -> SavedStep:
    """Reads a saved step. Raises PreflightError, which lists the saved steps where this step is not saved."""
    checkpoint = checkpoint.expanduser().resolve()
    match = STEP.fullmatch(checkpoint.name)
    places = (checkpoint.parent, checkpoint.parent.parent)
    run_dir = next((place for place in places if (place / CONFIG).is_file()), None)
    if match is None or run_dir is None:
        lacks = f": neither {checkpoint.parent} nor the folder above it has a {CONFIG}" if match else ""
        raise PreflightError(f"{checkpoint}{lacks}; expected RUN/global_step_N of a run")
    config, step = run_config(run_dir), int(match[1])
    folder = checkpoint.parent if (checkpoint / "actor").is_dir() else checkpoints_of(run_dir, config)
    _require([step], saved_steps(folder), folder)
    return SavedStep(run_dir, folder / checkpoint.name, step, config)


def steps_of(run_dir: Path, steps: Sequence[int] | None) -> list[SavedStep]:
    """Reads steps of a run, its last one for None; step 0 is the policy that it starts from, whose folder does not exist.
    Raises PreflightError."""
    config = run_config(run_dir)
    folder = checkpoints_of(run_dir, config)
    saved = saved_steps(folder)
    if steps is None and not saved:
        use = "step 0 is the policy that it starts from"
        raise PreflightError(f"no whole checkpoint in {folder} (trainer.save_freq); {use}")
    steps = saved[-1:] if steps is None else steps
    _require(steps, [0, *saved], folder)
    return [SavedStep(run_dir, folder / f"global_step_{step}", step, config) for step in steps]


def _require(steps: Sequence[int], saved: Sequence[int], folder: Path) -> None:
    if missing := [step for step in steps if step not in saved]:
        names = ", ".join(map(str, saved)) or "no step"
        raise PreflightError(f"step {missing[0]} is not saved; {folder} has {names}")


def checkpoints_of(run_dir: Path, config: DictConfig) -> Path:
    """Returns the folder of the checkpoints, also when the run's folder was moved."""
    folder, before = Path(config.trainer.default_local_dir), Path(config.run_dir)
    return run_dir / folder.relative_to(before) if folder.is_relative_to(before) else folder


def saved_steps(folder: Path) -> list[int]:
    """Returns the complete steps. verl names the last in a file, and empties the folders of old steps."""
    last = last_checkpoint(folder)
    return [step for step in resume.saved_steps(folder) if last is None or step <= last]
