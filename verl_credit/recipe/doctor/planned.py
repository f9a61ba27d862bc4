"""Checks with `verl-credit plan` that a device holds the recipe, and that memory is left for a first compilation."""

from __future__ import annotations

from omegaconf import DictConfig, OmegaConf

from verl_credit.errors import ConfigError
from verl_credit.recipe.doctor.context import Context
from verl_credit.recipe.doctor.machine import device_free
from verl_credit.recipe.doctor.result import Result, failed, passed, skipped, warned
from verl_credit.recipe.doctor.software import engine_share, wants_cuda
from verl_credit.recipe.machine import GIB, Device, size
from verl_credit.recipe.plan.plan import Plan, make_plan

STATE = ("weights", "gradients", "optimizer")  # exact sizes; activations and engine are estimates
# hardware of a recipe that was sent to a GPU with memory of its own
ELSEWHERE = (None, "cpu", "laptop", "gb10")
SHARE = 0.5  # largest share of a unified memory: at .80 and at .50 a first start froze a GB10 (sglang#35860; docs/spark.md)
JOB = 8 * GIB  # peak memory of one nvcc (flashinfer#3634)
SHARE_KEY = "actor_rollout_ref.rollout.gpu_memory_utilization"


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
    predicted_sizes = (
        f"{phase.name}: {size(phase.total)} predicted, of it {size(state)} weights, gradients and optimiser"
    )
    if plan.fits and state <= phase.capacity:
        return passed(predicted_sizes)
    overrides = dict.fromkeys(o for remedy in plan.remedies for o in remedy.overrides)
    judge = failed if state > phase.capacity else warned
    fix = " ".join(overrides) or "a smaller model, or more devices"
    return judge(predicted_sizes, f"at most {size(phase.capacity)} a device", fix)


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
