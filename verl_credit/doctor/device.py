"""CUDA devices, the attention kernels that have to run on them, and the assembler that triton calls."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from omegaconf import DictConfig, OmegaConf

from verl_credit.doctor.facts import Facts, Ptxas, size
from verl_credit.doctor.gather import in_a_process
from verl_credit.doctor.result import Result, failed, passed, skipped, warned
from verl_credit.doctor.software import wants_cuda

ATTENTION = "actor_rollout_ref.model.override_config.attn_implementation"
TRIAL_S = 240.0  # a first compilation takes tens of seconds, more where the assembler starts from cold disks
HEAD_DIM = 128  # of all Qwen3 models above 0.6 B

# The same trial as at the start of a run: two packed rows, one with answers behind it, against the definition.
TRIAL = """
import sys, torch
from verl_credit.host.attention.implementation import choose
device, dtype = torch.device(sys.argv[2]), torch.bfloat16
print("agrees:", choose(sys.argv[1], device, dtype, int(sys.argv[3])))
"""

Trial = Callable[[str], tuple[int | None, str]]

# CUDA release whose ptxas is the first to know a capability (PTX ISA release notes: 8.6, 8.7, 8.8, 9.0).
FIRST_PTXAS = {
    (10, 0): (12, 8),
    (10, 1): (12, 8),
    (10, 3): (12, 9),
    (11, 0): (13, 0),
    (12, 0): (12, 8),
    (12, 1): (12, 9),
}


def run_trial(kernel: str) -> tuple[int | None, str]:
    return in_a_process(["-c", TRIAL, kernel, "cuda", str(HEAD_DIM)], TRIAL_S)


def check_cuda(facts: Facts, config: DictConfig | None) -> Result:
    """Driver, runtime, devices with their capability; as many as the recipe takes on a node."""
    name, torch, wanted = "cuda", facts.torch, wants_cuda(config)
    runtime = f"driver for CUDA {facts.driver or '?'}, torch built for CUDA {torch.cuda or '-'}"
    devices = ", ".join(
        f"{d.name} (sm_{d.capability[0]}{d.capability[1]}, {size(d.total)})" for d in facts.devices
    )
    if not facts.devices:
        why = f": {torch.error}" if torch.error else ""
        if not wanted:
            return skipped(name, f"no CUDA device{why}")
        if clustered(facts, config):
            return skipped(name, "no CUDA device here; the Ray cluster's nodes have to bring them (see ray)")
        return failed(
            name,
            f"trainer.device=cuda, and no CUDA device is visible ({runtime}){why}",
            "nvidia-smi lists a device, and its driver is at least as new as torch's CUDA",
            "mend the driver or CUDA_VISIBLE_DEVICES, or take a recipe for this machine: hardware=laptop",
        )
    if driver_too_old(facts.driver, torch.cuda):
        return failed(name, runtime, f"a driver for CUDA {torch.cuda} or newer",
                      "update the driver, or install a torch built for its CUDA")  # fmt: skip
    per_node = 0 if config is None or not wanted else config.trainer.n_gpus_per_node
    if len(facts.devices) < per_node and not clustered(facts, config):
        return failed(
            name,
            f"{len(facts.devices)} devices ({devices}), and trainer.n_gpus_per_node={per_node}",
            "as many as the recipe takes",
            f"trainer.n_gpus_per_node={len(facts.devices)}, or another hardware=",
        )
    return passed(name, f"{devices}; {runtime}")


def driver_too_old(driver: str, runtime: str | None) -> bool:
    """Within one major release a newer runtime runs on an older driver; across majors it does not."""
    if not driver or not runtime:
        return False
    return int(driver.split(".")[0]) < int(runtime.split(".")[0])


def clustered(facts: Facts, config: DictConfig | None) -> bool:
    """A Ray cluster is named in the environment: its nodes, not this machine, have the devices."""
    return bool(facts.environment.get("RAY_ADDRESS")) or (config is not None and config.trainer.nnodes > 1)


def check_flash(facts: Facts, config: DictConfig | None, trial: Trial = run_trial) -> Result:
    """Importable is not enough: a wheel for another torch or device imports and then fails in the first call."""
    name, version = "flash-attn", facts.packages.get("flash-attn")
    attention = None if config is None else OmegaConf.select(config, ATTENTION)
    required = wants_cuda(config) and attention in ("credit_flash", "flash_attention_2")
    if version is None:
        if required:
            return failed(name, f"not installed, and {ATTENTION}={attention}", "flash-attn for this torch and CUDA",
                          f"pip install flash-attn --no-build-isolation, or {ATTENTION}=auto")  # fmt: skip
        return skipped(
            name, "not installed; FlexAttention or SDPA stand in for it, and our log-probs for its loss"
        )
    if not facts.devices:
        return skipped(name, f"flash-attn {version} is installed, and there is no CUDA device to run it on")
    judge = failed if required else warned
    return _tried(name, f"flash-attn {version}", partial(trial, "credit_flash"), judge,
                  "reinstall it for this torch (pip install --force-reinstall --no-build-isolation flash-attn), "
                  f"or leave it out: {ATTENTION}=auto takes the next kernel")  # fmt: skip


def check_flex(facts: Facts, config: DictConfig | None, trial: Trial = run_trial) -> Result:
    """FlexAttention has to compile, which takes triton, a C compiler and an assembler that knows the device."""
    name = "flex-attention"
    if not facts.devices:
        return skipped(name, "no CUDA device; on a CPU attention is SDPA, row by row")
    attention = None if config is None else OmegaConf.select(config, ATTENTION)
    judge = failed if wants_cuda(config) and attention == "credit_flex" else warned
    return _tried(name, "FlexAttention", partial(trial, "credit_flex"), judge,
                  "see ptxas; a C compiler and Python.h are needed too (apt install gcc python3-dev)")  # fmt: skip


def _tried(name: str, what: str, trial: Callable[[], tuple[int | None, str]], judge, mend: str) -> Result:
    code, said = trial()
    lines = [line for line in said.strip().splitlines() if line.strip()]
    last = lines[-1] if lines else "no output"
    if code is None:
        return judge(
            name, f"{what}: not done after {TRIAL_S:g} s ({last[:200]})", "a tiny call that ends", mend
        )
    if code != 0 or not last.startswith("agrees:"):
        return judge(
            name, f"{what} does not run: {last[:300]}", "a tiny call that agrees with the definition", mend
        )
    return passed(name, f"{what} runs on {HEAD_DIM}-wide heads in bf16: {last.removeprefix('agrees: ')}")


def check_ptxas(facts: Facts, config: DictConfig | None) -> Result:
    """Blackwell only: triton brings an assembler of its own, which may be older than the device."""
    name = "ptxas"
    blackwell = [d for d in facts.devices if d.capability[0] >= 10]
    if not blackwell:
        return skipped(name, "no Blackwell device (capability 10.0 or higher)")
    needed = max(first_ptxas(d.capability) for d in blackwell)
    device = max(blackwell, key=lambda d: first_ptxas(d.capability))
    which = f"sm_{device.capability[0]}{device.capability[1]} ({device.name})"
    variable, used = assembler_of(facts)
    right = f"ptxas of CUDA {_dotted(needed)} or newer for {which}"
    if used is not None and used.version >= needed:
        return passed(name, f"{used.path}, of CUDA {_dotted(used.version)}: knows {which}")
    found = f"{used.path}, of CUDA {_dotted(used.version)}" if used else "no ptxas that runs"
    newer = [p for p in facts.ptxas if not p.bundled and p.version >= needed]
    if newer:
        best = max(newer, key=lambda p: p.version)
        return failed(name, f"triton would call {found}", right, f"export {variable}={best.path}")
    return failed(
        name,
        f"triton would call {found}, and no newer one is on this machine",
        right,
        f"install one (apt install cuda-nvcc-13-0, or pip install nvidia-cuda-nvcc), then export {variable}=PATH/bin/ptxas",
    )


def first_ptxas(capability: tuple[int, int]) -> tuple[int, int]:
    """A capability that is not listed is newer than this file: CUDA 13.0 is the least."""
    return FIRST_PTXAS.get(capability, (13, 0))


def assembler_of(facts: Facts) -> tuple[str, Ptxas | None]:
    """(variable that chooses it, the assembler triton would call for Blackwell).

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
