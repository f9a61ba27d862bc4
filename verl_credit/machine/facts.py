"""Facts about a machine as plain data, so that every check can be tested with a machine that is not there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

GIB = 2**30


@dataclass(frozen=True)
class Device:
    """A CUDA device. Bytes; ``free`` is what cudaMemGetInfo says, ``integrated`` shares the CPU's memory."""

    name: str
    capability: tuple[int, int]
    total: int
    free: int
    integrated: bool = False

    @property
    def unified(self) -> bool:
        """One memory for CPU and GPU. GB10 is known by name and capability too: drivers differ in what they tell."""
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
    """Bytes. ``limit`` and ``limit_used`` are the control group's, None without one; used without cached files."""

    total: int
    available: int
    limit: int | None = None
    limit_used: int = 0
    shm_total: int = 0
    shm_free: int = 0

    @property
    def usable(self) -> int:
        """What a new process can take: the smaller of what is available and what the limit leaves."""
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
    """An assembler on this machine. ``bundled`` by triton; ``version`` of CUDA, as (major, minor)."""

    path: str
    version: tuple[int, int]
    bundled: bool = False
    blackwell: bool = False
    """triton's second one, used from capability 10.0 on and chosen by a variable of its own."""


@dataclass(frozen=True)
class Facts:
    """The machine that doctor looks at. ``packages``: installed versions by canonical name."""

    python: tuple[int, int, int]
    packages: Mapping[str, str]
    torch: Torch
    memory: Memory
    driver: str = ""
    """CUDA version that the driver supports, "" without a driver."""
    cpus: int = 1
    processes: tuple[Process, ...] = ()
    ptxas: tuple[Ptxas, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    now: float = 0.0

    @property
    def devices(self) -> tuple[Device, ...]:
        return self.torch.devices


def size(count: float) -> str:
    """Bytes as a person reads them."""
    return f"{count / GIB:.1f} GiB" if count >= GIB / 10 else f"{count / 2**20:.0f} MiB"
