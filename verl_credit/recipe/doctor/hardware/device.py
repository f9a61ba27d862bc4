"""CUDA devices, and the assembler that triton calls."""

from __future__ import annotations

from omegaconf import DictConfig

from verl_credit.recipe.doctor.context import Context
from verl_credit.recipe.doctor.hardware.software import wants_cuda
from verl_credit.recipe.doctor.result import Result, failed, passed, skipped
from verl_credit.recipe.machine.facts import Facts, Ptxas, size

# CUDA release whose ptxas is the first to know a capability (PTX ISA release notes: 8.6, 8.7, 8.8, 9.0).
FIRST_PTXAS = {
    (10, 0): (12, 8),
    (10, 1): (12, 8),
    (10, 3): (12, 9),
    (11, 0): (13, 0),
    (12, 0): (12, 8),
    (12, 1): (12, 9),
}


def check_cuda(context: Context) -> Result:
    """Checks the driver, the runtime, and that there are as many devices as the recipe takes on a node."""
    facts, config = context.facts, context.config
    torch, wanted = facts.torch, wants_cuda(config)
    runtime = f"driver for CUDA {facts.driver or '?'}, torch built for CUDA {torch.cuda or '-'}"
    devices = ", ".join(
        f"{d.name} (sm_{d.capability[0]}{d.capability[1]}, {size(d.total)})" for d in facts.devices
    )
    if not facts.devices:
        why = f": {torch.error}" if torch.error else ""
        if not wanted:
            return skipped(f"no CUDA device{why}")
        if clustered(facts, config):
            return skipped("no CUDA device here; the Ray cluster's nodes have to bring them (see ray)")
        return failed(
            f"trainer.device=cuda, and no CUDA device is visible ({runtime}){why}",
            "nvidia-smi lists a device, and its driver is at least as new as torch's CUDA",
            "fix the driver or CUDA_VISIBLE_DEVICES, or take a recipe for this machine: hardware=laptop",
        )
    if driver_too_old(facts.driver, torch.cuda):
        return failed(runtime, f"a driver for CUDA {torch.cuda} or newer",
                      "update the driver, or install a torch built for its CUDA")  # fmt: skip
    per_node = 0 if config is None or not wanted else config.trainer.n_gpus_per_node
    if len(facts.devices) < per_node and not clustered(facts, config):
        return failed(
            f"{len(facts.devices)} devices ({devices}), and trainer.n_gpus_per_node={per_node}",
            "as many as the recipe takes",
            f"trainer.n_gpus_per_node={len(facts.devices)}, or another hardware=",
        )
    return passed(f"{devices}; {runtime}")


def driver_too_old(driver: str, runtime: str | None) -> bool:
    """Within one major release a newer runtime runs on an older driver; across majors it does not."""
    if not driver or not runtime:
        return False
    return int(driver.split(".")[0]) < int(runtime.split(".")[0])


def clustered(facts: Facts, config: DictConfig | None) -> bool:
    """Is a Ray cluster named in the environment? Then its nodes, not this machine, have the devices."""
    return bool(facts.environment.get("RAY_ADDRESS")) or (config is not None and config.trainer.nnodes > 1)


def check_ptxas(context: Context) -> Result:
    """Checks Blackwell devices only: the assembler that triton brings may be older than the device."""
    facts = context.facts
    blackwell = [d for d in facts.devices if d.capability[0] >= 10]
    if not blackwell:
        return skipped("no Blackwell device (capability 10.0 or higher)")
    needed = max(first_ptxas(d.capability) for d in blackwell)
    device = max(blackwell, key=lambda d: first_ptxas(d.capability))
    which = f"sm_{device.capability[0]}{device.capability[1]} ({device.name})"
    variable, used = assembler_of(facts)
    right = f"ptxas of CUDA {_dotted(needed)} or newer for {which}"
    if used is not None and used.version >= needed:
        return passed(f"{used.path}, of CUDA {_dotted(used.version)}: knows {which}")
    present = f"{used.path}, of CUDA {_dotted(used.version)}" if used else "no ptxas that runs"
    newer = [p for p in facts.ptxas if not p.bundled and p.version >= needed]
    if newer:
        best = max(newer, key=lambda p: p.version)
        return failed(f"triton would call {present}", right, f"export {variable}={best.path}")
    return failed(
        f"triton would call {present}, and no newer one is on this machine",
        right,
        f"install one (apt install cuda-nvcc-13-0, or pip install nvidia-cuda-nvcc), then export {variable}=PATH/bin/ptxas",
    )


def first_ptxas(capability: tuple[int, int]) -> tuple[int, int]:
    """The first CUDA release for a capability; a capability that is not listed needs at least CUDA 13.0."""
    return FIRST_PTXAS.get(capability, (13, 0))


def assembler_of(facts: Facts) -> tuple[str, Ptxas | None]:
    """Returns (variable that chooses it, assembler that triton would call for Blackwell).

    Newer tritons bring a second one for capability 10.0 and up, with a variable of its own; older ones have one for all.
    """
    second = any(p.blackwell for p in facts.ptxas)
    variable = "TRITON_PTXAS_BLACKWELL_PATH" if second else "TRITON_PTXAS_PATH"
    chosen = facts.environment.get(variable)
    if chosen:
        return variable, next((p for p in facts.ptxas if p.path == chosen), None)
    bundled = [p for p in facts.ptxas if p.bundled and p.blackwell == second]
    return variable, bundled[0] if bundled else None


def _dotted(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"
