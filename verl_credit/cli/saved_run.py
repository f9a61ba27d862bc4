"""Reads a run's saved configuration and checkpoints. The run may still be going."""

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
    steps = saved_steps(folder)
    if step not in steps:
        names = ", ".join(map(str, steps)) or "no step"
        raise PreflightError(f"{checkpoint}: step {step} is not saved; {folder} has {names}")
    return SavedStep(run_dir, folder / checkpoint.name, step, config)


def checkpoints_of(run_dir: Path, config: DictConfig) -> Path:
    """Returns the folder of the checkpoints, also when the run's folder was moved."""
    folder, before = Path(config.trainer.default_local_dir), Path(config.run_dir)
    return run_dir / folder.relative_to(before) if folder.is_relative_to(before) else folder


def saved_steps(folder: Path) -> list[int]:
    """Returns the complete steps. verl names the last in a file, and empties the folders of old steps."""
    last = last_checkpoint(folder)
    return [step for step in resume.saved_steps(folder) if last is None or step <= last]
