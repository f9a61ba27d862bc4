"""Starts a run in its own folder with the configuration and a checkpoint of another run.

The other run is only read, and may still be going.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from verl_credit.cli.command import ChildFailed
from verl_credit.errors import ConfigError, ExitCode, IntegrityError, PreflightError
from verl_credit.recipe.world import serves_search
from verl_credit.study.campaign.child import Children, train_command

RECIPE, LOG = "another_run", "train.log"
DATA_ORDER = "data.pt"


def own_folder(folder: Path) -> dict:
    """The keys of a run that writes only into ``folder``, and evaluates nothing."""
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
        "global_profiler.steps": None,
    }


def resumed(folder: Path, checkpoint: Path) -> dict:
    """The keys of a run that resumes ``checkpoint`` after `link_checkpoint`."""
    return {
        "trainer.resume_mode": "resume_path",
        "trainer.resume_from_path": str(_linked(folder, checkpoint)),
        "trainer.del_local_ckpt_after_load": False,
    }


def link_checkpoint(checkpoint: Path, folder: Path) -> None:
    """Links the saved step without its data loader's state, which does not fit another batch size; nothing is copied."""
    there = _linked(folder, checkpoint)
    there.mkdir(parents=True)
    for path in checkpoint.iterdir():
        if path.name != DATA_ORDER:
            (there / path.name).symlink_to(path)


def _linked(folder: Path, checkpoint: Path) -> Path:
    return folder / "from" / checkpoint.name


def write_recipe(folder: Path, config: DictConfig, fixed: Mapping) -> None:
    """Writes the other run's configuration as a recipe; keys that are newer than the run have their defaults."""
    recipe = OmegaConf.create({"defaults": ["ppo_trainer", "credit_defaults", "_self_"]})
    recipe = OmegaConf.merge(recipe, config)
    for key, value in fixed.items():
        OmegaConf.update(recipe, key, value, force_add=True)
    if serves_search(config):  # the server of the other run has ended; the new run starts its own
        recipe.search.url = None
    OmegaConf.save(recipe, folder / f"{RECIPE}.yaml")


def check_overrides(overrides: Sequence[str], fixed: Mapping, config: DictConfig, who: str) -> None:
    """Raises ConfigError for an override of a key in ``fixed``, which ``who`` sets, and for a missing secret, because runs
    do not store secrets."""
    keys = {text.lstrip("+~").partition("=")[0]: text for text in overrides}
    for key, text in keys.items():
        if taken := [name for name in fixed if name == key or name.startswith(f"{key}.")]:
            raise ConfigError(f"{text}: {taken[0]} is set by {who} and cannot be overridden")
    for key, value in _hidden("", OmegaConf.to_container(config)):
        if key not in keys and not (key == "search.url" and serves_search(config)):
            raise ConfigError(
                key=key, value=value, accepted="a run stores no passwords; give it with an override"
            )


def _hidden(key: str, value) -> Iterator[tuple[str, str]]:
    """Yields the keys whose values a run's file lacks or has without their secrets."""
    if isinstance(value, dict):
        for name, one in value.items():
            yield from _hidden(f"{key}.{name}" if key else str(name), one)
    elif "***" in str(value):
        yield key, ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def run_alone(folder: Path, overrides: Sequence[str], otherwise: str) -> None:
    """Trains in a process of its own, so that Ray and verl start afresh; its output goes to ``folder``/train.log.

    Raises PreflightError where it is refused and ChildFailed or IntegrityError where it fails, with ``otherwise`` and the
    end of that file, and KeyboardInterrupt where a signal stopped it.
    """
    log = folder / LOG
    with Children() as children:
        children.start("", train_command(RECIPE, overrides, str(folder)), log)
        _, code = children.wait()
    if children.stopped or code == ExitCode.INTERRUPTED:
        raise KeyboardInterrupt
    if code != ExitCode.DONE:
        lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
        last = lines[-1:] if code == ExitCode.PREFLIGHT else lines[-8:]
        text = "\n".join([f"{otherwise}: it ended with exit code {code} ({log}):", *last])
        if code == ExitCode.PREFLIGHT:
            raise PreflightError(text)
        raise (IntegrityError if code == ExitCode.INTEGRITY else ChildFailed)(text)
