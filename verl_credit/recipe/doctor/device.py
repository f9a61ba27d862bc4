"""Checks CUDA devices: the driver, the recipe's plan on them, and the attention kernels, which are tried as at a start."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

from omegaconf import DictConfig, OmegaConf

from verl_credit.config.resolved import data
from verl_credit.errors import ConfigError
from verl_credit.policy.families import ATTENTION, AUTO, OURS
from verl_credit.recipe.doctor.context import Context
from verl_credit.recipe.doctor.software import wants_cuda
from verl_credit.recipe.doctor.status import Result, failed, passed, skipped, warned
from verl_credit.recipe.model_files import folders_of
from verl_credit.recipe.plan.model_shape import shape_of
from verl_credit.recipe.plan.plan import Plan, make_plan
from verl_credit.recipe.this_machine import GIB, Device, in_a_process, size
from verl_credit.recipe.world import MODEL

_, VARLEN, SDPA, FLEX = OURS
TRIAL_S = 240.0  # a first compilation takes tens of seconds, more where the assembler starts from cold disks
HEADS = (32, 8, 128)  # (query heads, key heads, head size) of Qwen3-4B and 8B

TRIAL = """
import sys, torch
from verl_credit.policy.attention.implementation import Heads, choose
name, device, heads = sys.argv[1], torch.device(sys.argv[2]), Heads(*map(int, sys.argv[3:]))
found = [choose(name, device, torch.bfloat16, heads, gradients=gradients) for gradients in (False, True)]
print("agrees:", max(found, key=lambda choice: choice.error))
"""

STATE = ("weights", "gradients", "optimizer")  # exact sizes; activations and engine are estimates
# hardware of a recipe that was sent to a GPU with memory of its own
ELSEWHERE = (None, "cpu", "laptop", "gb10")
FIXES = {
    VARLEN: "reinstall it for this torch (pip install --force-reinstall --no-build-isolation flash-attn), "
            f"or leave it out: {ATTENTION}={AUTO} takes SDPA",
    SDPA: "a torch built for this device; it needs one of SDPA's fused backends (flash, memory-efficient)",
    FLEX: "a C compiler, Python.h (apt install gcc python3-dev), and for Blackwell a newer ptxas (docs/recipes.md)",
}  # fmt: skip
"""The kernels that are tried, and what helps where one does not run."""

Trial = Callable[..., tuple[int | None, str]]


def check_cuda(context: Context) -> Result:
    """Checks the driver, the runtime, and that there are as many devices as the recipe takes on a node."""
    facts, config = context.facts, context.config
    torch, driver = facts.torch, facts.driver
    trainer = config.trainer if wants_cuda(config) else None
    # The nodes of a Ray cluster that the environment names, and not this machine, have the devices.
    clustered = trainer is not None and (facts.environment.get("RAY_ADDRESS") or trainer.nnodes > 1)
    runtime = f"driver for CUDA {driver or '?'}, torch built for CUDA {torch.cuda or '-'}"
    devices = ", ".join(f"{d.name} ({_sm(d.capability)}, {size(d.total)})" for d in facts.devices)
    if not facts.devices:
        why = f": {torch.error}" if torch.error else ""
        if trainer is None:
            return skipped(f"no CUDA device{why}")
        if clustered:
            return skipped("no CUDA device here; the Ray cluster's nodes have to bring them (see ray)")
        return failed(
            f"trainer.device=cuda, and no CUDA device is visible ({runtime}){why}",
            "nvidia-smi lists a device, and its driver is at least as new as torch's CUDA",
            "fix the driver or CUDA_VISIBLE_DEVICES, or take a recipe for this machine: hardware=laptop",
        )
    # Within one major release a newer runtime runs on an older driver; across majors it does not.
    if driver and torch.cuda and int(driver.split(".")[0]) < int(torch.cuda.split(".")[0]):
        return failed(runtime, f"a driver for CUDA {torch.cuda} or newer",
                      "update the driver, or install a torch built for its CUDA")  # fmt: skip
    per_node = 0 if trainer is None else trainer.n_gpus_per_node
    if len(facts.devices) < per_node and not clustered:
        return failed(
            f"{len(facts.devices)} devices ({devices}), and trainer.n_gpus_per_node={per_node}",
            "as many as the recipe takes",
            f"trainer.n_gpus_per_node={len(facts.devices)}, or another hardware=",
        )
    return passed(f"{devices}; {runtime}")


def _sm(capability: tuple[int, int]) -> str:
    return "sm_{}{}".format(*capability)


def check_plan(context: Context) -> Result:
    """Fails when weights, gradients and optimiser alone are larger than a device; anything else that is predicted
    not to fit is a warning, because a wrong prediction must not stop a run that would work."""
    facts, config = context.facts, context.config
    if not wants_cuda(config):
        return skipped("on a CPU: verl-credit plan says what is predicted")
    if not facts.devices:
        return skipped("no device to fit")
    try:
        plan = plan_here(config, min(facts.devices, key=lambda device: device.total))
    except ConfigError as error:
        return skipped(f"cannot be planned: {error}")
    # The most bytes of state that a phase holds on a device; offloaded state is not counted.
    state = max(sum(p.parts.get(part, 0.0) for part in STATE) for p in plan.phases if p.where == "device")
    phase = plan.peak
    sizes = (
        f"{phase.name}: {size(phase.total)} predicted, of it {size(state)} weights, gradients and optimiser"
    )
    if plan.fits and state <= phase.capacity:
        return passed(sizes)
    judge = failed if state > phase.capacity else warned
    fix = "; ".join([*plan.remedies, "a smaller model, or more devices"])
    return judge(sizes, f"at most {size(phase.capacity)} a device", fix)


def plan_here(config: DictConfig, device: Device) -> Plan:
    """Plans the recipe with this device in place of its own. Raises ConfigError."""
    plain = data(config)
    block = dict(plain.get("hardware") or {})
    if device.unified:
        block["name"] = "gb10"
    elif block.get("name") in ELSEWHERE:
        block["name"] = "h100"
    return make_plan({**plain, "hardware": {**block, "memory_gib": device.total / GIB}})


def run_trial(name: str, heads: tuple[int, int, int], device: str = "cuda") -> tuple[int | None, str]:
    """Runs the start's trial in a separate process: rows with appended answers, compared with the definition, in bf16."""
    return in_a_process(["-c", TRIAL, name, device, *map(str, heads)], TRIAL_S)


def check_attention(context: Context, trial: Trial = run_trial) -> Result | list[Result]:
    """Runs each kernel that the recipe may take: a wheel for another torch is imported, and fails in its first call."""
    facts, config = context.facts, context.config
    asked = None if config is None else OmegaConf.select(config, ATTENTION)
    version = facts.packages.get("flash-attn")
    either = [VARLEN, SDPA] if version else [SDPA]
    kernels = [VARLEN] if asked == "flash_attention_2" else [asked] if asked in FIXES else either
    required = wants_cuda(config) and len(kernels) == 1
    if VARLEN in kernels and not version and required:
        return failed(f"flash-attn is not installed, and {ATTENTION}={asked}", "flash-attn for this torch and CUDA",
                      f"pip install flash-attn --no-build-isolation, or {ATTENTION}={AUTO}")  # fmt: skip
    if not facts.devices:
        return skipped("no CUDA device; on a CPU attention is SDPA, row by row")
    return [_tried(kernel, heads_of(config), trial, failed if required else warned) for kernel in kernels]


def heads_of(config: DictConfig | None) -> tuple[int, int, int]:
    """The heads of the recipe's model, from its folder, its name or its config.json in the hub's cache; else `HEADS`."""
    path = None if config is None else OmegaConf.select(config, MODEL)
    for model in [path, *map(str, folders_of(path))] if isinstance(path, str) and path else []:
        with suppress(ConfigError):
            shape = shape_of(model)
            return shape.heads, shape.kv_heads, shape.head_dim
    return HEADS


def _tried(kernel: str, heads: tuple[int, int, int], trial: Trial, judge: Callable[..., Result]) -> Result:
    """Tries the kernel; ``judge`` makes the result of a trial that goes wrong."""
    name = f"attention {kernel}"
    code, printed = trial(kernel, heads)
    last = next((line for line in reversed(printed.splitlines()) if line.strip()), "no output")
    if code is None:
        found = f"{kernel}: not done after {TRIAL_S:g} s ({last[:200]})"
        return judge(found, "a small call that ends", FIXES[kernel], name)
    if code != 0 or not last.startswith("agrees:"):
        found = f"{kernel} does not run: {last[:300]}"
        return judge(found, "a small call that agrees with the definition", FIXES[kernel], name)
    widths = "{} heads of queries, {} of keys, {} wide".format(*heads)
    return passed(f"{kernel} runs on {widths}, in bf16: {last.removeprefix('agrees: ')}", name)
