"""Does what a recipe would hold fit the devices that are here? By `verl-credit plan`, on this machine's memory."""

from __future__ import annotations

from omegaconf import DictConfig, OmegaConf

from verl_credit.errors import ConfigError
from verl_credit.recipe.doctor.context import Context
from verl_credit.recipe.doctor.hardware.software import wants_cuda
from verl_credit.recipe.doctor.result import Result, failed, passed, skipped, warned
from verl_credit.recipe.machine.facts import GIB, Device, size
from verl_credit.recipe.plan.plan import Plan, make_plan

STATE = ("weights", "gradients", "optimizer")  # counted; activations and the engine's needs are estimates

ELSEWHERE = (None, "cpu", "laptop", "gb10")  # machines of a recipe that was sent to a GPU of its own memory


def check_room(context: Context) -> Result:
    """Fails when weights, gradients and optimiser alone are larger than a device; otherwise what is predicted not to fit
    is a warning, for a prediction must not stop a run that would work."""
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
    found = (
        f"{phase.name}: {size(phase.total)} predicted, of it {size(state)} weights, gradients and optimiser"
    )
    right = f"at most {size(phase.capacity)} a device"
    if state > phase.capacity:
        return failed(found, right, _mend(plan))
    return passed(found) if plan.fits else warned(found, right, _mend(plan))


def plan_here(config: DictConfig, device: Device) -> Plan:
    """`verl-credit plan` with this device for the recipe's. Raises ConfigError."""
    plain = OmegaConf.to_container(config, resolve=True)
    block = dict(plain.get("hardware") or {})
    if device.unified:
        block["name"] = "gb10"
    elif block.get("name") in ELSEWHERE:
        block["name"] = "h100"
    return make_plan({**plain, "hardware": {**block, "memory_gib": device.total / GIB}})


def _state(plan: Plan) -> float:
    """Bytes on a device in the phase that holds most of it; what is offloaded is not there."""
    held = [sum(p.parts.get(part, 0.0) for part in STATE) for p in plan.phases if p.where == "device"]
    return max(held)


def _mend(plan: Plan) -> str:
    overrides = dict.fromkeys(o for remedy in plan.remedies for o in remedy.overrides)
    return " ".join(overrides) or "a smaller model, or more devices"
