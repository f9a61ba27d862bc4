"""Memory, shared memory, ports."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator

import psutil
from omegaconf import DictConfig, OmegaConf

from verl_credit.recipe.compose import flat_values
from verl_credit.recipe.doctor.context import Context
from verl_credit.recipe.doctor.hardware.software import wants_cuda
from verl_credit.recipe.doctor.result import Result, failed, passed, skipped, warned
from verl_credit.recipe.machine.facts import GIB, Device, Facts, size

SMALLEST_FREE = 4 * GIB  # the lab on a CPU peaks at 3.7 GiB over all its processes
RAY_SHARE = 0.3  # Ray's default share of the memory for its object store
SOMEBODY_ELSES = ".prometheus.port"  # this server runs already; verl makes it read its configuration again
SWITCHES = ("enable", "enabled", "include_dashboard")
SWITCHED_ON_LATER = "transfer_queue.enable"  # false in every configuration; verl's v1 trainer sets it
BUSY = 0.1  # share of a device's memory in use by other processes from which the check warns


def check_memory(context: Context) -> list[Result]:
    devices = enumerate(context.facts.devices)
    return [
        _host_memory(context.facts),
        *(_device_memory(f"memory of device {i}", d, context) for i, d in devices),
    ]


def _host_memory(facts: Facts) -> Result:
    memory = facts.memory
    state = (
        f"{size(memory.available)} available of {size(memory.total)} (files in the cache count as available)"
    )
    if memory.limit is not None:
        state += f"; control group: {size(memory.limit_used)} of {size(memory.limit)} used"
    if memory.usable < SMALLEST_FREE:
        return warned(state, f"{size(SMALLEST_FREE)} for the smallest recipe (the lab)",
                      "end what you do not need, or raise the container's limit (docker run --memory)")  # fmt: skip
    return passed(state)


def _device_memory(name: str, device: Device, context: Context) -> Result:
    free = device_free(device, context.facts)
    if device.unified:
        state = (
            f"{size(free)} free of {size(device.total)}, shared with the CPU (MemAvailable: cudaMemGetInfo says "
            f"{size(device.free)}, because it counts cached files as used)"
        )
    else:
        state = f"{size(free)} free of {size(device.total)}"
    share = engine_share(context.config)
    if share is not None and free < share * device.total:
        return failed(
            state,
            f"vLLM takes actor_rollout_ref.rollout.gpu_memory_utilization={share:g} of all of it = "
            f"{size(share * device.total)} when it starts",
            "end what holds it (see processes), or lower that share",
            name,
        )
    if not device.unified and free < (1 - BUSY) * device.total:
        return warned(state, "an idle device", "nvidia-smi names who holds it", name)
    return passed(state, name)


def device_free(device: Device, facts: Facts) -> int:
    """Bytes that a process can take. On unified memory these are the CPU's available bytes, within its limits."""
    return min(device.total, facts.memory.usable) if device.unified else device.free


def engine_share(config: DictConfig | None) -> float | None:
    if not wants_cuda(config) or config.actor_rollout_ref.rollout.name != "vllm":
        return None
    return float(config.actor_rollout_ref.rollout.gpu_memory_utilization)


def check_shm(context: Context) -> Result:
    """Checks shared memory, which holds Ray's object store and NCCL's buffers between the GPUs of a node."""
    memory, config = context.facts.memory, context.config
    if not memory.shm_total:
        return skipped("this system has none")
    given = None if config is None else OmegaConf.select(config, "ray_kwargs.ray_init.object_store_memory")
    wanted = given or min(RAY_SHARE * memory.total, memory.available)
    state = f"{size(memory.shm_free)} free of {size(memory.shm_total)}"
    if memory.shm_free >= wanted:
        return passed(state)
    return warned(
        state,
        f"{size(wanted)} for Ray's object store; without it Ray uses the disk, which is slow",
        "docker run --shm-size, or ray_kwargs.ray_init.object_store_memory (bytes) smaller",
    )


def check_ports(context: Context, holder: Callable[[int], str | None] | None = None) -> Result:
    """Checks that every port with a number in the recipe is free."""
    wanted = dict(named_ports(context.config))
    taken = {key: who for key, port in wanted.items() if (who := (holder or port_holder)(port))}
    if taken:
        return failed(
            "; ".join(f"{key}={wanted[key]} is in use by {who}" for key, who in taken.items()),
            "ports that are free",
            " ".join(f"{key}=ANOTHER" for key in taken),
        )
    return passed(f"free: {', '.join(f'{k}={p}' for k, p in wanted.items())}" if wanted else "none is fixed")


def named_ports(config: DictConfig) -> Iterator[tuple[str, int]]:
    """Yields (key, number) for every ``port`` or ``*_port`` above 0 that the run would listen on."""
    values = flat_values(config)
    for key, value in values.items():
        leaf = key.rpartition(".")[2]
        is_port = (leaf == "port" or leaf.endswith("_port")) and not key.endswith(SOMEBODY_ELSES)
        if is_port and type(value) is int and value > 0 and not _switched_off(key, values):
            yield key, value


def _switched_off(key: str, values: dict[str, object]) -> bool:
    parts = key.split(".")[:-1]
    sections = [".".join(parts[:n]) for n in range(1, len(parts) + 1)]
    switches = {f"{section}.{name}" for section in sections for name in SWITCHES} - {SWITCHED_ON_LATER}
    return any(values.get(switch) is False for switch in switches)


def port_holder(port: int) -> str | None:
    """The process that listens on ``port`` of this machine ("process 12 (python)"); None when the port is free."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a port in TIME_WAIT is free
        try:
            probe.bind(("0.0.0.0", port))
            return None
        except OSError as error:
            reason = error.strerror or str(error)
    try:
        for connection in psutil.net_connections("tcp"):
            if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port and connection.pid:
                return f"process {connection.pid} ({psutil.Process(connection.pid).name()})"
    except (psutil.Error, OSError):
        pass
    return f"another process ({reason})"
