"""The policies that `verl-credit fidelity` measures: steps of a run, a checkpoint, or a policy that no run made."""

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pyarrow
import pyarrow.parquet
from omegaconf import DictConfig, OmegaConf

from verl_credit.built_folder import read_manifest
from verl_credit.cli.saved_run import CONFIG, saved_step, steps_of
from verl_credit.errors import ConfigError, PreflightError
from verl_credit.recipe.compose import load_config, quoted
from verl_credit.study.fidelity.subject import Subject, load_checkpoint, load_policy, make_subject
from verl_credit.worlds.lab.config import NAME

QUESTION_FILES = {"train": "data.train_files", "test": "data.val_files"}
"""The key of a run that names a split's file. The split ``dev`` is the lab's own."""


@dataclass(frozen=True)
class Policy:
    """A policy in ``folder``, a checkpoint or in Hugging Face format; ``step`` of the run that has the configuration."""

    folder: Path
    config: DictConfig
    step: int | None

    @property
    def name(self) -> str:
        """The name of the policy's folder among the results."""
        return "policy" if self.step is None else f"step_{self.step}"

    def load(self, *, lab: Path | None, split: str, prompts: int | None) -> Subject:
        """Loads the policy. ``lab``: the lab's present folder; None for the configuration's."""
        lab = Path(lab or self.config.lab.dir).expanduser().resolve()
        questions = self._questions(split, lab)
        policy = (load_checkpoint if self.step else load_policy)(self.folder)
        given = {"questions": questions, "lab": lab, "prompts": prompts, "step": self.step}
        return make_subject(str(self.folder), self.config, *policy, **given)

    def _questions(self, split: str, lab: Path) -> Path:
        """The file with the questions of the split. Raises ConfigError where a run's is not one."""
        key = QUESTION_FILES.get(split)
        if self.step is None or key is None:
            return lab / f"{split}.parquet"
        path = _in_lab(Path(OmegaConf.select(self.config, key)), self.config, lab)
        with suppress(OSError, pyarrow.ArrowInvalid):
            if {"prompt", "reward_model"} <= {*pyarrow.parquet.read_schema(path).names}:
                return path
        use = "expected a parquet file with the columns prompt and reward_model"
        raise ConfigError(key=key, value=str(path), accepted=use)


def step_numbers(text: str | None) -> list[int] | None:
    """Reads ``--steps``. Raises PreflightError."""
    if text is None:
        return None
    try:
        steps = list(dict.fromkeys(int(part) for part in text.split(",") if part.strip()))
    except ValueError:
        steps = []
    if not steps or min(steps) < 0:
        raise PreflightError(f"--steps {text}: expected step numbers with commas between: 0,15,30")
    return steps


def policies_of(folder: Path, steps: list[int] | None, lab: Path | None) -> list[Policy]:
    """Returns the policies of a folder. ``steps``: only for a run; None is its last checkpoint, 0 its first policy."""
    folder = folder.expanduser().resolve()
    if not folder.is_dir():
        raise PreflightError("no such folder; expected a run's, a checkpoint's, or a policy's")
    if (folder / CONFIG).is_file():
        found = steps_of(folder, steps)
        folders = [saved.folder if saved.step else _start(saved.config, lab) for saved in found]
        return [Policy(at, saved.config, saved.step) for at, saved in zip(folders, found, strict=True)]
    if steps is not None:
        given = ",".join(map(str, steps))
        raise PreflightError(f"--steps {given}: expected with a run's folder, which has a {CONFIG}")
    if not (folder / "config.json").is_file():
        saved = saved_step(folder)
        return [Policy(saved.folder, saved.config, saved.step)]
    home = (lab or folder.parent).expanduser().resolve()
    given = [f"lab.dir={quoted(str(home))}"]
    with suppress(ValueError):  # no lab is there, which is refused where its files are read
        hops = read_manifest(home, NAME).get("hops")
        given += [] if hops is None else [f"lab.hops={hops}"]
    return [Policy(folder, load_config("lab", given), None)]


def _start(config: DictConfig, lab: Path | None) -> Path:
    """The policy that the run starts from, also in a moved lab."""
    path = Path(config.actor_rollout_ref.model.path)
    if "lab" not in config:  # it may be a hub name, which the run itself loads
        return path
    if lab is not None:
        path = _in_lab(path, config, lab.expanduser().resolve())
    if not path.is_dir():
        where = f"actor_rollout_ref.model.path={path}"
        raise PreflightError(f"--steps 0: {where} does not exist; expected a folder (--lab, if it was moved)")
    return path


def _in_lab(path: Path, config: DictConfig, lab: Path) -> Path:
    """The same place in the lab's present folder, if the path is below the configuration's."""
    return lab / path.relative_to(config.lab.dir) if path.is_relative_to(config.lab.dir) else path
