"""A `torch.<device>` module for the CPU as verl expects it: torch.cpu lacks the memory functions."""

import os
import platform
from types import ModuleType, SimpleNamespace

import psutil
import torch


def _resident_bytes() -> int:
    return psutil.Process(os.getpid()).memory_info().rss


def _peak_resident_bytes() -> int:
    """The largest resident size of this process so far (ru_maxrss is in KiB on Linux, in bytes on macOS)."""
    import resource

    unit = 1 if platform.system() == "Darwin" else 1024
    # The kernel updates its peak late, so it can be a little below the current size.
    return max(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit, _resident_bytes())


def _mem_get_info(device: object = None) -> tuple[int, int]:
    memory = psutil.virtual_memory()
    return memory.available, memory.total


def _nothing(*args: object, **kwargs: object) -> None:
    """Does nothing: a CPU has no caches, streams and peak counters."""


def build() -> ModuleType:
    """A module with torch.cpu's functions and memory functions for this process and this machine.

    `memory_allocated` and similar functions return the *resident size of the whole process*, since the CPU allocator keeps
    no statistics; `mem_get_info` returns the machine's available and total memory. `is_available()` returns False, because
    verl calls it before it cleans or profiles an accelerator's memory.
    """
    module = ModuleType("verl_credit_cpu_device")
    # A torch.device and not an index: verl calls tensor.to(current_device()), and to(0) would mean cuda:0.
    module.current_device = lambda: torch.device("cpu")
    module.device_count = lambda: 1
    module.is_available = lambda: False
    module.is_initialized = lambda: True
    module.get_device_name = lambda device=None: "CPU"
    module.get_device_properties = lambda device=None: SimpleNamespace(
        name="CPU", total_memory=psutil.virtual_memory().total
    )
    module.get_device_capability = lambda device=None: (None, None)
    module.mem_get_info = _mem_get_info
    for name in ("memory_allocated", "memory_reserved"):
        setattr(module, name, lambda device=None: _resident_bytes())
    for name in ("max_memory_allocated", "max_memory_reserved"):
        setattr(module, name, lambda device=None: _peak_resident_bytes())
    resets = ("reset_peak_memory_stats", "reset_accumulated_memory_stats")
    for name in ("empty_cache", "ipc_collect", "set_device", "synchronize", *resets):
        setattr(module, name, _nothing)
    module.manual_seed = module.manual_seed_all = lambda seed: torch.manual_seed(seed)
    module.get_rng_state = lambda device=None: torch.get_rng_state()
    module.set_rng_state = lambda state, device=None: torch.set_rng_state(state)
    for name in ("Stream", "Event", "stream", "current_stream"):
        setattr(module, name, getattr(torch.cpu, name))
    return module
