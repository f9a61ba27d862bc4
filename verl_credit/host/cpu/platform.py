"""The platform "cpu" in verl's registry, used only with VERL_PLATFORM=cpu."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from verl.plugin.platform.platform_base import PlatformBase
from verl.plugin.platform.platform_manager import PlatformRegistry

from verl_credit.host.cpu import device_module
from verl_credit.host.cpu.process_group import describes_a_rank, init_gloo_group


@PlatformRegistry.register(platform="cpu")
class PlatformCPU(PlatformBase):
    """Trains in main memory. Ray's resource "GPU" is only a name here: one logical unit per training rank."""

    def __init__(self) -> None:
        self._device_module = device_module.build()

    @property
    def device_name(self) -> str:
        return "cpu"

    @property
    def vendor_name(self) -> str:
        return "cpu"

    @property
    def device_module(self) -> ModuleType:
        return self._device_module

    def is_available(self) -> bool:
        return True

    def is_platform_available(self, use_smi_check: bool = False) -> bool:
        """False, so that automatic detection never chooses the CPU, even on a head node without a GPU."""
        return False

    def current_device(self) -> torch.device:
        """A torch.device where verl's signature says int: its value goes into tensor.to(...)."""
        return self._device_module.current_device()

    def device_count(self) -> int:
        return 1

    def set_device(self, device_index: int) -> None:
        pass

    def synchronize(self, device_index: int | None = None) -> None:
        pass

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        torch.manual_seed(seed)

    def set_allocator_settings(self, settings: str) -> None:
        pass

    def empty_cache(self) -> None:
        pass

    def get_device_capability(self, device_index: int = 0) -> tuple[int | None, int | None]:
        return None, None

    def communication_backend_name(self) -> str:
        """ "gloo".

        verl calls this in one place, just before a training worker joins the default group and looks up its engine. So a
        CPU worker makes its group and registers the engine here.
        """
        if describes_a_rank(os.environ):
            from verl_credit.host.cpu import engine  # noqa: F401  (the import registers the engine)

            init_gloo_group()
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"

    @contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        yield

    def profiler_start(self) -> None:
        pass

    def profiler_stop(self) -> None:
        pass

    def ray_resource_name(self) -> str:
        """ "GPU": the only accelerator name for which verl counts a node's units without a driver."""
        return "GPU"

    def ray_noset_envvars(self) -> list[str]:
        return ["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"]

    def is_ipc_supported(self) -> bool:
        return False

    def cudart(self) -> Any:
        return None
