"""Checks CUDA devices: the driver, and the recipe's plan on them."""

from __future__ import annotations

from omegaconf import DictConfig

from verl_credit.config.resolved import data
from verl_credit.errors import ConfigError
from verl_credit.recipe.doctor.context import Context
from verl_credit.recipe.doctor.software import wants_cuda
from verl_credit.recipe.doctor.status import Result, failed, passed, skipped, warned
from verl_credit.recipe.plan.plan import Plan, make_plan
from verl_credit.recipe.this_machine import GIB, Device, size

STATE = ("weights", "gradients", "optimizer")  # exact sizes; activations and engine are estimates
# hardware of a recipe that was sent to a GPU with memory of its own
ELSEWHERE = (None, "cpu", "laptop", "gb10")


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
            "fix the driver or CUDA_VISIBLE_DEVICES, or take the CPU: hardware=laptop actor_rollout_ref.rollout.name=hf",
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
