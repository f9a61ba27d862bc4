"""Facts about a machine as plain data, so that checks can be tested for other machines."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

GIB = 2**30


@dataclass(frozen=True)
class Device:
    """A CUDA device. Sizes are bytes; ``free`` is from cudaMemGetInfo, ``integrated`` devices share the CPU's memory."""

    name: str
    capability: tuple[int, int]
    total: int
    free: int
    integrated: bool = False

    @property
    def unified(self) -> bool:
        """Do CPU and GPU share one memory? GB10 is also recognised by name and capability, because drivers differ."""
        return self.integrated or "GB10" in self.name or self.capability == (12, 1)


@dataclass(frozen=True)
class Torch:
    """``cuda``: the CUDA version that torch was built for, None in a CPU build; ``error``: why it sees no device."""

    version: str | None
    cuda: str | None = None
    devices: tuple[Device, ...] = ()
    error: str = ""


@dataclass(frozen=True)
class Memory:
    """Sizes in bytes. ``limit`` and ``limit_used`` (without cached files) are the control group's; None without a limit."""

    total: int
    available: int
    limit: int | None = None
    limit_used: int = 0
    shm_total: int = 0
    shm_free: int = 0

    @property
    def usable(self) -> int:
        """Bytes that a new process can take: the smaller of the available memory and what the limit leaves."""
        if self.limit is None:
            return self.available
        return max(0, min(self.available, self.limit - self.limit_used))


@dataclass(frozen=True)
class Process:
    """``started``: seconds since the epoch; ``memory``: resident bytes."""

    pid: int
    parent: int
    name: str
    command: tuple[str, ...]
    user: str = "?"
    started: float = 0.0
    memory: int = 0

    @property
    def title(self) -> str:
        return self.command[0] if self.command and self.command[0] else self.name


@dataclass(frozen=True)
class Ptxas:
    """An assembler on this machine. ``bundled``: triton brings it; ``version``: the CUDA version as (major, minor)."""

    path: str
    version: tuple[int, int]
    bundled: bool = False
    blackwell: bool = False
    """triton's second assembler, used from capability 10.0 on and set by its own variable."""


@dataclass(frozen=True)
class Facts:
    """The machine that doctor looks at. ``packages``: installed versions by canonical name."""

    python: tuple[int, int, int]
    packages: Mapping[str, str]
    torch: Torch
    memory: Memory
    driver: str = ""
    """The CUDA version that the driver supports; "" without a driver."""
    cpus: int = 1
    processes: tuple[Process, ...] = ()
    ptxas: tuple[Ptxas, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    now: float = 0.0

    @property
    def devices(self) -> tuple[Device, ...]:
        return self.torch.devices


def size(count: float) -> str:
    """Writes bytes in GiB or MiB."""
    return f"{count / GIB:.1f} GiB" if count >= GIB / 10 else f"{count / 2**20:.0f} MiB"
