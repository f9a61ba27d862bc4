"""Memory, and disk space for the checkpoints of a run."""

from __future__ import annotations

import shutil
from pathlib import Path

from omegaconf import OmegaConf

from verl_credit.config.engines import engine_of
from verl_credit.recipe.doctor.context import Context
from verl_credit.recipe.doctor.software import engine_share
from verl_credit.recipe.doctor.status import Result, failed, passed, warned
from verl_credit.recipe.this_machine import GIB, Device, Facts, size
from verl_credit.records.run.files import count_kept

SMALLEST_FREE = 4 * GIB  # the lab on a CPU peaks at 3.7 GiB over all its processes
SHARE = "actor_rollout_ref.rollout.gpu_memory_utilization"
FROZE = 0.5  # at this share of a unified memory, and at .80, a first start froze a GB10 (sglang#35860)
BUSY = 0.1  # share of a device's memory in use by other processes from which the check warns


def check_memory(context: Context) -> list[Result]:
    """Returns a result for the host's memory and a result for every device's."""
    memory = context.facts.memory
    state = f"{size(memory.available)} available of {size(memory.total)} (cached files count as available)"
    if memory.limit is not None:
        state += f"; control group: {size(memory.limit_used)} of {size(memory.limit)} used"
    right = f"{size(SMALLEST_FREE)} for the smallest recipe (the lab)"
    fix = "end what you do not need, or raise the container's limit (docker run --memory)"
    host = warned(state, right, fix) if memory.usable < SMALLEST_FREE else passed(state)
    devices = enumerate(context.facts.devices)
    return [host, *(_device_memory(f"memory of device {i}", device, context) for i, device in devices)]


def _device_memory(name: str, device: Device, context: Context) -> Result:
    free = device_free(device, context.facts)
    state = f"{size(free)} free of {size(device.total)}"
    if device.unified:
        state += f", shared with the CPU (MemAvailable: cudaMemGetInfo says {size(device.free)}, cached files left out)"
    share = engine_share(context.config)
    if share is not None and free < share * device.total:
        return failed(
            state,
            f"{engine_of(context.recipe).name} takes {SHARE}={share:g} of it at its start: {size(share * device.total)}",
            "end what holds it (nvidia-smi names it), or lower that share",
            name,
        )
    if share is not None and device.unified and share >= FROZE:
        right = f"a share below {FROZE:g}: a first start froze such a machine (docs/recipes.md#one-dgx-spark)"
        return warned(f"{state}; {SHARE}={share:g}", right, f"{SHARE}=0.3", name)
    if not device.unified and free < (1 - BUSY) * device.total:
        return warned(state, "an idle device", "nvidia-smi names who holds it", name)
    return passed(state, name)


def device_free(device: Device, facts: Facts) -> int:
    """Bytes that a process can take. On unified memory these are the CPU's available bytes, within its limits."""
    return min(device.total, facts.memory.usable) if device.unified else device.free


def check_disk(context: Context, usage=shutil.disk_usage) -> Result:
    """Checks the space for the checkpoints that are kept and the checkpoint that is being written.

    A checkpoint has fp32 weights and, in full training, Adam's two moments: 12 bytes per parameter; 4 with LoRA.
    """
    config, trainer = context.recipe, context.recipe.trainer
    there = existing(Path(str(trainer.default_local_dir)).expanduser().absolute())
    free = usage(there).free
    state = f"{size(free)} free at {there}"
    if (trainer.save_freq or 0) <= 0 and not config.keep_checkpoints:
        return passed(f"{state}; no checkpoints are written (trainer.save_freq={trainer.save_freq})")
    if (parameters := context.parameters) is None:
        right, fix = "1 GiB at least; the model's size is not known", "trainer.default_local_dir=ELSEWHERE"
        return warned(state, right, fix) if free < GIB else passed(f"{state}; the model's size is not known")
    one = parameters * (4 if OmegaConf.select(config, "actor_rollout_ref.model.lora_rank") else 12)
    most, steps = trainer.get("max_actor_ckpt_to_keep"), trainer.get("total_training_steps")
    count = count_kept(steps, trainer.save_freq or 0, most, config.keep_checkpoints)
    all_of_them = one * ((count or 1) + 1)
    number = count or "every one (trainer.max_actor_ckpt_to_keep=null)"
    right = f"{size(one)} a checkpoint, {size(all_of_them)} with {number} kept and one being written"
    if free < one:
        return failed(state, right, "make space, or trainer.default_local_dir=ELSEWHERE")
    if free < all_of_them:
        return warned(state, right, "make space, or trainer.max_actor_ckpt_to_keep=1")
    return passed(f"{state}; {right}")


def existing(folder: Path) -> Path:
    """The folder itself, or its nearest existing parent."""
    return next(p for p in (folder, *folder.parents) if p.exists())
