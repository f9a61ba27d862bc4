"""Is there disk space for the checkpoints of a run, or of all runs of a sweep?"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from verl_credit.recipe.doctor.context import Context
from verl_credit.recipe.doctor.inputs.model import parameters_of
from verl_credit.recipe.doctor.result import Result, failed, passed, warned
from verl_credit.recipe.machine.facts import GIB, size
from verl_credit.recipe.world import MODEL
from verl_credit.records.run.files import count_kept


def check_disk(context: Context, usage=shutil.disk_usage) -> Result:
    """Checks the space for the checkpoints that are kept and the checkpoint that is being written."""
    config = context.config
    there = existing(_folder(config))
    free = usage(there).free
    state = f"{size(free)} free at {there}"
    if not _writes(config):
        return passed(f"{state}; no checkpoints are written (trainer.save_freq={config.trainer.save_freq})")
    parameters = context.parameters
    if parameters is None:
        right, fix = "1 GiB at least; the model's size is not known", "trainer.default_local_dir=ELSEWHERE"
        return warned(state, right, fix) if free < GIB else passed(f"{state}; the model's size is not known")
    one, count = checkpoint_bytes(config, parameters), checkpoints_kept(config)
    all_of_them = one * ((count or 1) + 1)
    number = count or "every one (trainer.max_actor_ckpt_to_keep=null)"
    right = f"{size(one)} a checkpoint, {size(all_of_them)} with {number} kept and one being written"
    if free < one:
        return failed(state, right, "make space, or trainer.default_local_dir=ELSEWHERE")
    if free < all_of_them:
        return warned(state, right, "make space, or trainer.max_actor_ckpt_to_keep=1")
    return passed(f"{state}; {right}")


def sweep_warnings(configs: Sequence[DictConfig], usage=shutil.disk_usage) -> list[str]:
    """Returns a line for every disk that cannot hold the checkpoints of all runs; existing checkpoints take no new space."""
    needed: dict[int, float] = {}
    largest: dict[int, float] = {}
    places: dict[int, Path] = {}
    for config in configs:
        parameters = parameters_of(OmegaConf.select(config, MODEL)) if _writes(config) else None
        if parameters is None:
            continue
        folder, one = _folder(config), checkpoint_bytes(config, parameters)
        there = existing(folder)
        disk = there.stat().st_dev
        all_kept = one * (checkpoints_kept(config) or 1)
        needed[disk] = needed.get(disk, 0) + max(0, all_kept - _held(folder))
        largest[disk] = max(largest.get(disk, 0), one)
        places.setdefault(disk, there)
    lines = []
    for disk, there in places.items():
        free, all_of_them = usage(there).free, needed[disk] + largest[disk]
        if free < all_of_them:
            lines.append(
                f"warning: disk: {size(free)} free at {there}; the checkpoints that all runs keep, and one being written, "
                f"take {size(all_of_them)} more: make space, or trainer.max_actor_ckpt_to_keep=1, or "
                "trainer.default_local_dir on another disk with ${run_dir} in it"
            )
    return lines


def checkpoints_kept(config: DictConfig) -> int | None:
    """The number of checkpoints kept in the end; None where all are kept and the number of steps is not known."""
    trainer = config.trainer
    most, steps = trainer.get("max_actor_ckpt_to_keep"), trainer.get("total_training_steps")
    return count_kept(steps, trainer.save_freq or 0, most, config.keep_checkpoints)


def checkpoint_bytes(config: DictConfig, parameters: int) -> int:
    """A checkpoint has fp32 weights and, in full training, Adam's two moments: 12 bytes per parameter; 4 with LoRA."""
    lora = OmegaConf.select(config, "actor_rollout_ref.model.lora_rank") or 0
    return parameters * (4 if lora > 0 else 12)


def _writes(config: DictConfig) -> bool:
    return (config.trainer.save_freq or 0) > 0 or bool(config.keep_checkpoints)


def _folder(config: DictConfig) -> Path:
    return Path(str(config.trainer.default_local_dir)).expanduser().absolute()


def existing(folder: Path) -> Path:
    """The folder itself, or its nearest existing parent."""
    return next(p for p in (folder, *folder.parents) if p.exists())


def _held(folder: Path) -> int:
    return sum(p.stat().st_size for p in folder.rglob("*") if p.is_file()) if folder.is_dir() else 0
