"""verl on a machine without an accelerator: the platform "cpu" in verl's registry, used only with VERL_PLATFORM=cpu."""

import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from types import ModuleType, SimpleNamespace

import psutil
import torch
from verl.plugin.platform.platform_base import PlatformBase
from verl.plugin.platform.platform_manager import PlatformRegistry

RANK_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""verl sets them in a training worker."""


def _nothing(*args: object, **kwargs: object) -> None:
    """Does nothing: a CPU has no index, caches, streams, allocator settings and profiler."""


@PlatformRegistry.register(platform="cpu")
class PlatformCPU(PlatformBase):
    """Trains in main memory. Ray's resource "GPU" is only a name here: one logical unit per training rank."""

    device_name = vendor_name = "cpu"

    @cached_property
    def device_module(self) -> ModuleType:
        return device_module()

    def is_available(self) -> bool:
        return True

    def is_platform_available(self, use_smi_check: bool = False) -> bool:
        """Returns False, so that automatic detection never chooses the CPU, even on a head node without a GPU."""
        return False

    def current_device(self) -> torch.device:
        """A torch.device where verl's signature says int: its value goes into tensor.to(...)."""
        return torch.device("cpu")

    def device_count(self) -> int:
        return 1

    manual_seed = manual_seed_all = staticmethod(torch.manual_seed)
    set_device = synchronize = set_allocator_settings = empty_cache = _nothing
    profiler_start = profiler_stop = cudart = _nothing

    def get_device_capability(self, device_index: int = 0) -> tuple[int | None, int | None]:
        return None, None

    def communication_backend_name(self) -> str:
        """ "gloo". verl calls this just before a training worker joins the default group and looks up its engine. So a CPU
        worker makes its group and registers the engine here."""
        if all(os.environ.get(name) for name in RANK_VARIABLES):
            from verl_credit.host.engine import fsdp, value_engine  # noqa: F401  (the import registers them)
            from verl_credit.host.engine.process_group import init_gloo_group

            init_gloo_group()
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"

    @contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        yield

    def ray_resource_name(self) -> str:
        """ "GPU": the only accelerator name for which verl counts a node's units without a driver."""
        return "GPU"

    def ray_noset_envvars(self) -> list[str]:
        return ["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"]

    def is_ipc_supported(self) -> bool:
        return False


def device_module() -> ModuleType:
    """A `torch.<device>` module as verl expects it: torch.cpu's functions, and the memory functions that torch.cpu lacks.

    `memory_allocated` and similar functions return the *resident size of the whole process*, since the CPU allocator keeps
    no statistics; `mem_get_info` returns the machine's available and total memory. `is_available()` returns False, because
    verl calls it before it cleans or profiles an accelerator's memory. `current_device()` is no index: verl calls
    tensor.to(current_device()), and to(0) would mean cuda:0.
    """
    module = ModuleType("verl_credit_cpu_device")
    nothing = ("empty_cache", "ipc_collect", "set_device", "synchronize")
    resets = ("reset_peak_memory_stats", "reset_accumulated_memory_stats")
    functions = {
        "current_device": lambda: torch.device("cpu"),
        "device_count": lambda: 1,
        "is_available": lambda: False,
        "is_initialized": lambda: True,
        "get_device_name": lambda device=None: "CPU",
        "get_device_properties": lambda device=None: SimpleNamespace(name="CPU", total_memory=_memory()[1]),
        "get_device_capability": lambda device=None: (None, None),
        "mem_get_info": _memory,
        **dict.fromkeys(("memory_allocated", "memory_reserved"), _resident_bytes),
        **dict.fromkeys(("max_memory_allocated", "max_memory_reserved"), _peak_resident_bytes),
        **dict.fromkeys((*nothing, *resets), _nothing),
        **dict.fromkeys(("manual_seed", "manual_seed_all"), torch.manual_seed),
        "get_rng_state": lambda device=None: torch.get_rng_state(),
        "set_rng_state": lambda state, device=None: torch.set_rng_state(state),
        **{name: getattr(torch.cpu, name) for name in ("Stream", "Event", "stream", "current_stream")},
    }
    vars(module).update(functions)
    return module


def _memory(device: object = None) -> tuple[int, int]:
    """(available, total) of the machine."""
    memory = psutil.virtual_memory()
    return memory.available, memory.total


def _resident_bytes(device: object = None) -> int:
    return psutil.Process().memory_info().rss


def _peak_resident_bytes(device: object = None) -> int:
    """The largest resident size of this process (ru_maxrss is in KiB on Linux, in bytes on macOS)."""
    import resource

    unit = 1 if platform.system() == "Darwin" else 1024
    # The kernel updates its peak late, so it can be a little below the current size.
    return max(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit, _resident_bytes())
