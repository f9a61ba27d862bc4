"""Checks CUDA devices: the driver, triton's assembler, the recipe's plan on them, and the attention kernels.

The plan (`verl-credit plan`) has to fit a device and leave memory for a first compilation. A kernel is tried as at a start.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

from omegaconf import DictConfig, OmegaConf

from verl_credit.errors import ConfigError
from verl_credit.policy.families import ATTENTION, AUTO, OURS
from verl_credit.recipe.doctor.context import Context
from verl_credit.recipe.doctor.machine import device_free
from verl_credit.recipe.doctor.model import folders_of
from verl_credit.recipe.doctor.result import Result, failed, passed, skipped, warned
from verl_credit.recipe.doctor.software import engine_share, wants_cuda
from verl_credit.recipe.machine import GIB, Device, in_a_process, size
from verl_credit.recipe.plan.model_shape import shape_of
from verl_credit.recipe.plan.plan import Plan, make_plan
from verl_credit.recipe.world import MODEL

# The CUDA release whose ptxas is the first to support a capability (PTX ISA release notes: 8.6, 8.7, 8.8, 9.0).
# A capability that is not listed needs at least CUDA 13.0.
FIRST_PTXAS = {
    (10, 0): (12, 8), (10, 1): (12, 8), (10, 3): (12, 9), (11, 0): (13, 0), (12, 0): (12, 8), (12, 1): (12, 9),
}  # fmt: skip
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
SHARE = 0.5  # largest share of a unified memory: at .80 and at .50 a first start froze a GB10 (sglang#35860; docs/spark.md)
JOB = 8 * GIB  # peak memory of one nvcc (flashinfer#3634)
SHARE_KEY = "actor_rollout_ref.rollout.gpu_memory_utilization"

Trial = Callable[..., tuple[int | None, str]]


def check_cuda(context: Context) -> Result:
    """Checks the driver, the runtime, and that there are as many devices as the recipe takes on a node."""
    facts, config = context.facts, context.config
    torch, driver, wanted = facts.torch, facts.driver, wants_cuda(config)
    # The nodes of a Ray cluster that the environment names, and not this machine, have the devices.
    clustered = wanted and (facts.environment.get("RAY_ADDRESS") or config.trainer.nnodes > 1)
    runtime = f"driver for CUDA {driver or '?'}, torch built for CUDA {torch.cuda or '-'}"
    devices = ", ".join(f"{d.name} ({_sm(d.capability)}, {size(d.total)})" for d in facts.devices)
    if not facts.devices:
        why = f": {torch.error}" if torch.error else ""
        if not wanted:
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
    per_node = config.trainer.n_gpus_per_node if wanted else 0
    if len(facts.devices) < per_node and not clustered:
        return failed(
            f"{len(facts.devices)} devices ({devices}), and trainer.n_gpus_per_node={per_node}",
            "as many as the recipe takes",
            f"trainer.n_gpus_per_node={len(facts.devices)}, or another hardware=",
        )
    return passed(f"{devices}; {runtime}")


def check_ptxas(context: Context) -> Result:
    """Checks Blackwell devices only: the assembler that triton brings may be older than the device.

    Newer tritons bring a second one for capability 10.0 and up, with a variable of its own; older ones have one for all.
    """
    facts = context.facts
    needs = {d: FIRST_PTXAS.get(d.capability, (13, 0)) for d in facts.devices if d.capability[0] >= 10}
    if not needs:
        return skipped("no Blackwell device (capability 10.0 or higher)")
    device, needed = max(needs.items(), key=lambda item: item[1])
    which = f"{_sm(device.capability)} ({device.name})"
    second = any(p.blackwell for p in facts.ptxas)
    variable = "TRITON_PTXAS_BLACKWELL_PATH" if second else "TRITON_PTXAS_PATH"
    chosen = facts.environment.get(variable)
    called = [p for p in facts.ptxas if (p.path == chosen if chosen else p.bundled and p.blackwell == second)]
    right = f"ptxas of CUDA {_dotted(needed)} or newer for {which}"
    present = f"{called[0].path}, of CUDA {_dotted(called[0].version)}" if called else "no ptxas that runs"
    if called and called[0].version >= needed:
        return passed(f"{present}: knows {which}")
    if newer := [p for p in facts.ptxas if not p.bundled and p.version >= needed]:
        best = max(newer, key=lambda p: p.version)
        return failed(f"triton would call {present}", right, f"export {variable}={best.path}")
    return failed(
        f"triton would call {present}, and no newer one is on this machine",
        right,
        f"install one (apt install cuda-nvcc-13-0, or pip install nvidia-cuda-nvcc), then export {variable}=PATH/bin/ptxas",
    )


def _sm(capability: tuple[int, int]) -> str:
    return "sm_{}{}".format(*capability)


def _dotted(version: tuple[int, int]) -> str:
    return "{}.{}".format(*version)


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
    overrides = dict.fromkeys(o for remedy in plan.remedies for o in remedy.overrides)
    judge = failed if state > phase.capacity else warned
    fix = " ".join(overrides) or "a smaller model, or more devices"
    return judge(sizes, f"at most {size(phase.capacity)} a device", fix)


def plan_here(config: DictConfig, device: Device) -> Plan:
    """Plans the recipe with this device in place of its own. Raises ConfigError."""
    plain = OmegaConf.to_container(config, resolve=True)
    block = dict(plain.get("hardware") or {})
    if device.unified:
        block["name"] = "gb10"
    elif block.get("name") in ELSEWHERE:
        block["name"] = "h100"
    return make_plan({**plain, "hardware": {**block, "memory_gib": device.total / GIB}})


def check_compilation(context: Context) -> Result:
    """Checks on unified memory that vLLM's share and the plan leave enough for the compilers of a first start.

    jobs x 8 GiB <= memory - planned in the rollout phase,  jobs = MAX_JOBS, or ninja's default: cores + 2
    """
    facts, config = context.facts, context.config
    share = engine_share(config)
    device = next((d for d in facts.devices if d.unified), None)
    if share is None:
        return skipped("no recipe that rolls out with vLLM on a GPU")
    if device is None:
        return skipped("no device shares its memory with the CPU")
    try:
        rollout = next(p for p in plan_here(config, device).phases if p.name == "rollout")
        left, subtracted = (
            device.total - rollout.total,
            f"the rollout phase is planned with {size(rollout.total)}",
        )
    except ConfigError:
        taken, free = share * device.total, device_free(device, facts)
        left, subtracted = free - taken, f"the engine takes {size(taken)} of {size(free)} that are free"
    given = facts.environment.get("MAX_JOBS", "")
    given = int(given) if given.isascii() and given.isdigit() else 0
    jobs = given or facts.cpus + 2
    max_jobs = f"MAX_JOBS={given}" if given else f"MAX_JOBS not set: {jobs} compilers on {facts.cpus} cores"
    budget = (
        f"{SHARE_KEY}={share:g} of {size(device.total)}; {subtracted}, {size(max(left, 0))} left; {max_jobs}"
    )
    fit = max(0, int(left // JOB))
    fix = f"export MAX_JOBS={max(1, min(fit, facts.cpus))}"
    if share >= SHARE:
        right = (
            f"a share below {SHARE:g}: at .80 and at .50 a first start froze such a machine (sglang#35860)"
        )
        return warned(budget, right, f"{SHARE_KEY}=0.3, {fix}")
    if jobs > fit:
        right = f"at most {fit} compilers of up to {size(JOB)} each (flashinfer#3634)"
        return warned(budget, right, fix if fit else f"a smaller {SHARE_KEY}, {fix}")
    return passed(budget)


def run_trial(name: str, heads: tuple[int, int, int], device: str = "cuda") -> tuple[int | None, str]:
    """Runs the start's trial in a separate process: rows with appended answers, compared with the definition, in bf16."""
    return in_a_process(["-c", TRIAL, name, device, *map(str, heads)], TRIAL_S)


def check_flash(context: Context, trial: Trial = run_trial) -> Result:
    """Runs flash-attn, because a wheel for another torch or device can be imported and then fails in the first call."""
    facts, config = context.facts, context.config
    version, attention = facts.packages.get("flash-attn"), _attention(config)
    required = wants_cuda(config) and attention in (VARLEN, "flash_attention_2")
    if version is None and required:
        return failed(f"not installed, and {ATTENTION}={attention}", "flash-attn for this torch and CUDA",
                      f"pip install flash-attn --no-build-isolation, or {ATTENTION}={AUTO}")  # fmt: skip
    if version is None:
        return skipped("not installed; SDPA stands in for it, and our log-probs for its loss")
    if not facts.devices:
        return skipped(f"flash-attn {version} is installed, and there is no CUDA device to run it on")
    fix = (
        "reinstall it for this torch (pip install --force-reinstall --no-build-isolation flash-attn), "
        f"or leave it out: {ATTENTION}={AUTO} takes SDPA"
    )
    return _tried(f"flash-attn {version}", VARLEN, config, trial, required, fix)


def check_sdpa(context: Context, trial: Trial = run_trial) -> Result:
    """Checks SDPA, which `auto` takes where flash-attn is absent or does not run."""
    facts, config, attention = context.facts, context.config, _attention(context.config)
    if not facts.devices:
        return skipped("no CUDA device; on a CPU attention is SDPA, row by row")
    if attention not in (None, AUTO, SDPA):
        return skipped(f"{ATTENTION}={attention}")
    alone = attention == SDPA or "flash-attn" not in facts.packages
    fix = "a torch built for this device; it needs one of SDPA's fused backends (flash, memory-efficient)"
    return _tried("SDPA", SDPA, config, trial, wants_cuda(config) and alone, fix)


def check_flex(context: Context, trial: Trial = run_trial) -> Result:
    """Checks that FlexAttention compiles, which takes triton, a C compiler and an assembler that supports the device."""
    config = context.config
    if not context.facts.devices:
        return skipped("no CUDA device")
    if _attention(config) != FLEX:
        return skipped(f"not asked for: {ATTENTION}={AUTO} takes flash-attn or SDPA before it")
    fix = "see ptxas; a C compiler and Python.h are needed too (apt install gcc python3-dev)"
    return _tried("FlexAttention", FLEX, config, trial, wants_cuda(config), fix)


def heads_of(config: DictConfig | None) -> tuple[int, int, int]:
    """The heads of the recipe's model, from its folder, its name or its config.json in the hub's cache; else `HEADS`."""
    path = None if config is None else OmegaConf.select(config, MODEL)
    for model in (path, *folders_of(path)) if isinstance(path, str) and path else ():
        with suppress(ConfigError):
            shape = shape_of(model)
            return shape.heads, shape.kv_heads, shape.head_dim
    return HEADS


def _attention(config: DictConfig | None) -> str | None:
    return None if config is None else OmegaConf.select(config, ATTENTION)


def _tried(what: str, kernel: str, config, trial: Trial, required: bool, fix: str) -> Result:
    """Tries the kernel; a trial that goes wrong is a failure where the recipe depends on the kernel, else a warning."""
    heads, judge = heads_of(config), failed if required else warned
    code, printed = trial(kernel, heads)
    last = next((line for line in reversed(printed.splitlines()) if line.strip()), "no output")
    if code is None:
        return judge(f"{what}: not done after {TRIAL_S:g} s ({last[:200]})", "a small call that ends", fix)
    if code != 0 or not last.startswith("agrees:"):
        return judge(
            f"{what} does not run: {last[:300]}", "a small call that agrees with the definition", fix
        )
    widths = "{} heads of queries, {} of keys, {} wide".format(*heads)
    return passed(f"{what} runs on {widths}, in bf16: {last.removeprefix('agrees: ')}")
