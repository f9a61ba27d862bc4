"""What a first start of vLLM meets: FlashInfer's packages, which have to be of one version, and compilers and their memory.

A device that shares its memory with the CPU (GB10) takes the whole machine down with it; docs/spark.md names the reports.
"""

from __future__ import annotations

from omegaconf import DictConfig
from packaging.version import InvalidVersion, Version

from verl_credit.errors import ConfigError
from verl_credit.recipe.doctor.context import Context
from verl_credit.recipe.doctor.hardware.machine import engine_share
from verl_credit.recipe.doctor.hardware.room import plan_here
from verl_credit.recipe.doctor.result import Result, passed, skipped, warned
from verl_credit.recipe.machine.facts import GIB, Device, Facts, size

FLASHINFER, CUBIN, JIT_CACHE = "flashinfer-python", "flashinfer-cubin", "flashinfer-jit-cache"
WHEELS = "https://flashinfer.ai/whl"
UNCHECKED = "FLASHINFER_DISABLE_VERSION_CHECK"
SHARE = 0.5  # of a unified memory: at .80 and at .50 a first start froze a GB10 (sglang#35860)
JOB = 8 * GIB  # of one nvcc at its peak (flashinfer#3634)
SHARE_KEY = "actor_rollout_ref.rollout.gpu_memory_utilization"


def check_flashinfer(context: Context) -> Result:
    """FlashInfer raises while it is imported when one of its two optional packages is of another version."""
    facts, version = context.facts, context.facts.packages.get(FLASHINFER)
    if context.config is not None and engine_share(context.config) is None:
        return skipped("the recipe does not roll out with vLLM on a GPU")
    if version is None:
        return skipped(f"{FLASHINFER} is not installed; vLLM chooses other kernels")
    cubin, jit_cache = facts.packages.get(CUBIN), facts.packages.get(JIT_CACHE)
    others = {CUBIN: cubin, JIT_CACHE: jit_cache}
    found = f"{FLASHINFER} {version}, " + ", ".join(f"{n} {v or 'not installed'}" for n, v in others.items())
    odd = [n for n, v in others.items() if v is not None and not same_release(v, version)]
    if odd:
        unchecked = facts.environment.get(UNCHECKED)
        fetch = " ".join(f"{n}=={version}" for n in odd)
        return warned(
            f"{found}, {UNCHECKED}={unchecked}" if unchecked else found,
            "one version: FlashInfer raises for another when it is imported (unless told not to compare), and vLLM ends",
            f"pip install {fetch} --index-url {WHEELS} (from 0.6.14 on {CUBIN} is not on the public index; "
            f"{JIT_CACHE}: {WHEELS}/cu130), or pip uninstall {' '.join(odd)}: kernels are then fetched or compiled",
        )
    if cubin is None:
        return warned(found, f"{CUBIN} {version}, or a first start that fetches and compiles kernels",
                      f"pip install {CUBIN}=={version} --index-url {WHEELS}")  # fmt: skip
    return passed(found)


def same_release(version: str, other: str) -> bool:
    """Equal but for a local part: flashinfer-jit-cache carries its CUDA there (0.6.12+cu130)."""
    try:
        return Version(version).public == Version(other).public
    except InvalidVersion:
        return version == other


def check_compilation(context: Context) -> Result:
    """Unified memory: what vLLM's share and the plan leave has to hold the compilers of a first start.

    jobs x 8 GiB <= memory - planned in the rollout phase,  jobs = MAX_JOBS, or ninja's default: cores + 2
    """
    facts, config = context.facts, context.config
    share = engine_share(config)
    device = next((d for d in facts.devices if d.unified), None)
    if share is None:
        return skipped("no recipe that rolls out with vLLM on a GPU")
    if device is None:
        return skipped("no device shares its memory with the CPU")
    left, said = _left(facts, config, device, share)
    given = _max_jobs(facts)
    jobs = given or facts.cpus + 2
    told = f"MAX_JOBS={given}" if given else f"MAX_JOBS not set: {jobs} compilers on {facts.cpus} cores"
    found = f"{SHARE_KEY}={share:g} of {size(device.total)}; {said}, {size(max(left, 0))} left; {told}"
    fit = max(0, int(left // JOB))
    fix = f"export MAX_JOBS={max(1, min(fit, facts.cpus))}"
    if share >= SHARE:
        right = (
            f"a share below {SHARE:g}: at .80 and at .50 a first start froze such a machine (sglang#35860)"
        )
        return warned(found, right, f"{SHARE_KEY}=0.3, {fix}")
    right = f"at most {fit} compilers of up to {size(JOB)} each (flashinfer#3634)"
    if jobs > fit:
        return warned(found, right, fix if fit else f"a smaller {SHARE_KEY}, {fix}")
    return passed(found)


def _left(facts: Facts, config: DictConfig, device: Device, share: float) -> tuple[float, str]:
    """(bytes that nothing is planned for while the engine runs, what was subtracted)."""
    try:
        rollout = next(p for p in plan_here(config, device).phases if p.name == "rollout")
        return device.total - rollout.total, f"the rollout phase is planned with {size(rollout.total)}"
    except (ConfigError, StopIteration):
        taken, free = share * device.total, min(device.total, facts.memory.usable)
        return free - taken, f"the engine takes {size(taken)} of {size(free)} that are free"


def _max_jobs(facts: Facts) -> int | None:
    given = facts.environment.get("MAX_JOBS", "")
    return int(given) if given.isascii() and given.isdigit() and int(given) else None
