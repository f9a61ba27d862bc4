"""Checks with `verl-credit plan` that a device holds the recipe, and that memory is left for a first compilation."""

from __future__ import annotations

from omegaconf import DictConfig, OmegaConf

from verl_credit.errors import ConfigError
from verl_credit.recipe.doctor.context import Context
from verl_credit.recipe.doctor.hardware.machine import device_free, engine_share
from verl_credit.recipe.doctor.hardware.software import wants_cuda
from verl_credit.recipe.doctor.result import Result, failed, passed, skipped, warned
from verl_credit.recipe.machine.facts import GIB, Device, Facts, size
from verl_credit.recipe.plan.plan import Plan, make_plan

STATE = ("weights", "gradients", "optimizer")  # exact sizes; activations and engine are estimates
ELSEWHERE = (
    None,
    "cpu",
    "laptop",
    "gb10",
)  # hardware of a recipe that was sent to a GPU with memory of its own
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
    state, phase = _state(plan), plan.peak
    predicted_sizes = (
        f"{phase.name}: {size(phase.total)} predicted, of it {size(state)} weights, gradients and optimiser"
    )
    right = f"at most {size(phase.capacity)} a device"
    if state > phase.capacity:
        return failed(predicted_sizes, right, _mend(plan))
    return passed(predicted_sizes) if plan.fits else warned(predicted_sizes, right, _mend(plan))


def plan_here(config: DictConfig, device: Device) -> Plan:
    """Plans the recipe with this device in place of its own. Raises ConfigError."""
    plain = OmegaConf.to_container(config, resolve=True)
    block = dict(plain.get("hardware") or {})
    if device.unified:
        block["name"] = "gb10"
    elif block.get("name") in ELSEWHERE:
        block["name"] = "h100"
    return make_plan({**plain, "hardware": {**block, "memory_gib": device.total / GIB}})


def _state(plan: Plan) -> float:
    """The most bytes of state that a phase holds on a device; offloaded state is not counted."""
    held = [sum(p.parts.get(part, 0.0) for part in STATE) for p in plan.phases if p.where == "device"]
    return max(held)


def _mend(plan: Plan) -> str:
    overrides = dict.fromkeys(o for remedy in plan.remedies for o in remedy.overrides)
    return " ".join(overrides) or "a smaller model, or more devices"


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
    left, subtracted = _left(facts, config, device, share)
    given = _max_jobs(facts)
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
    right = f"at most {fit} compilers of up to {size(JOB)} each (flashinfer#3634)"
    if jobs > fit:
        return warned(budget, right, fix if fit else f"a smaller {SHARE_KEY}, {fix}")
    return passed(budget)


def _left(facts: Facts, config: DictConfig, device: Device, share: float) -> tuple[float, str]:
    """Returns (bytes left while the engine runs, text that names the subtracted parts)."""
    try:
        rollout = next(p for p in plan_here(config, device).phases if p.name == "rollout")
        return device.total - rollout.total, f"the rollout phase is planned with {size(rollout.total)}"
    except (ConfigError, StopIteration):
        taken, free = share * device.total, device_free(device, facts)
        return free - taken, f"the engine takes {size(taken)} of {size(free)} that are free"


def _max_jobs(facts: Facts) -> int | None:
    given = facts.environment.get("MAX_JOBS", "")
    return int(given) if given.isascii() and given.isdigit() and int(given) else None
