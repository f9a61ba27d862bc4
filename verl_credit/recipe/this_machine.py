"""The facts of a machine as plain data, so that checks can be tested for other machines, and how they are read.

Reading judges nothing, and a missing part raises nothing.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import distributions
from pathlib import Path

from packaging.utils import canonicalize_name

GIB = 2**30

# The probe of CUDA runs in its own process: it makes a context of hundreds of megabytes, and a broken driver may end the
# process.
TORCH_PROBE = """
import json, torch
found = {"version": torch.__version__, "cuda": torch.version.cuda, "devices": [], "error": ""}
try:
    if torch.version.cuda:
        torch.cuda.init()
        for i in range(torch.cuda.device_count()):
            p = torch.cuda.get_device_properties(i)
            free, total = torch.cuda.mem_get_info(i)
            found["devices"].append({"name": p.name, "capability": [p.major, p.minor], "total": total, "free": free,
                                     "integrated": bool(getattr(p, "is_integrated", 0))})
except Exception as error:
    found["error"] = f"{type(error).__name__}: {str(error)}".splitlines()[0]
print(json.dumps(found))
"""


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
    """``cuda``: the CUDA version that torch was built for, None in a CPU build; ``error``: why there is no device."""

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

    @property
    def usable(self) -> int:
        """Bytes that a new process can take: the smaller of the available memory and what the limit leaves."""
        if self.limit is None:
            return self.available
        return max(0, min(self.available, self.limit - self.limit_used))


@dataclass(frozen=True)
class Facts:
    """The machine that doctor checks. ``packages``: installed versions by canonical name."""

    packages: Mapping[str, str]
    torch: Torch
    memory: Memory
    driver: str = ""
    """The CUDA version that the driver supports; "" without a driver."""
    cpus: int = 1
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def devices(self) -> tuple[Device, ...]:
        return self.torch.devices


def size(count: float) -> str:
    """Writes bytes in GiB or MiB."""
    return f"{count / GIB:.1f} GiB" if count >= GIB / 10 else f"{count / 2**20:.0f} MiB"


def gather(*, torch: bool = True) -> Facts:
    """Gathers all facts; without ``torch`` the CUDA probe (a few seconds) is left out."""
    return Facts(
        packages=installed(),
        torch=probe_torch() if torch else Torch(None),
        memory=memory(),
        driver=_driver(),
        cpus=cores(),
        environment=dict(os.environ),
    )


def cores() -> int:
    """The number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@cache
def installed() -> dict[str, str]:
    """Returns versions by distribution; of two distributions with one name the first on the path wins, as for an import."""
    by_name: dict[str, str] = {}
    for distribution in distributions():
        metadata = distribution.metadata  # parsed anew at every access
        if name := metadata["Name"]:
            by_name.setdefault(canonicalize_name(name), metadata["Version"])
    return by_name


def probe_torch(timeout_s: float = 120.0) -> Torch:
    code, output = in_a_process(["-c", TORCH_PROBE], timeout_s)
    try:
        facts = json.loads(output.splitlines()[-1])
    except (ValueError, IndexError):
        last = output.strip().splitlines()[-1:] or [f"exit code {code}"]
        return Torch(None, error=last[0])
    devices = tuple(Device(**{**d, "capability": tuple(d["capability"])}) for d in facts["devices"])
    return Torch(facts["version"], facts["cuda"], devices, facts["error"])


def in_a_process(arguments: list[str], timeout_s: float) -> tuple[int | None, str]:
    """Runs a fresh Python with our environment. Returns (exit code, or None after ``timeout_s``; output)."""
    try:
        done = subprocess.run(
            [sys.executable, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=timeout_s,
        )
    except subprocess.TimeoutExpired:
        return None, ""
    return done.returncode, done.stdout


def _driver() -> str:
    """Returns the CUDA version that the driver supports, as nvidia-smi prints it; "" without a driver."""
    try:
        output = subprocess.run(["nvidia-smi"], capture_output=True, text=True, timeout=20).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""
    match = re.search(r"CUDA Version:\s*(\d+\.\d+)", output)
    return match[1] if match else ""


def _cgroup_limits(proc: Path, root: Path) -> list[tuple[int, int]]:
    """(limit, bytes used without cached files) of each limited cgroup (v1 and v2) from this process's up."""
    try:
        lines = (proc / "self" / "cgroup").read_text().splitlines()
    except OSError:
        return []
    found = []
    for _, controllers, path in (line.split(":", 2) for line in lines):
        if controllers and "memory" not in controllers.split(","):
            continue
        base, most, now, cache = root, "memory.max", "memory.current", "inactive_file"
        if controllers:
            base, most, now = root / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
            cache = "total_inactive_file"
        group = base / path.lstrip("/")
        for folder in (group, *group.parents):  # a container may show a path of the host, which is not here
            with suppress(OSError, ValueError):  # a folder without a limit has the text "max", or no file
                limit, used = int((folder / most).read_text()), int((folder / now).read_text())
                statistics = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
                found.append((limit, max(0, used - int(statistics.get(cache, 0)))))
    return found


def memory(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> Memory:
    import psutil  # imported here, because the plan of a GPU machine does not need it

    now = psutil.virtual_memory()
    # psutil's "available" is MemAvailable: free memory and files that can be dropped
    limit, used = min(_cgroup_limits(proc, cgroups), default=(None, 0))
    if limit is not None and limit >= now.total:
        limit = None
    return Memory(now.total, now.available, limit, used)
