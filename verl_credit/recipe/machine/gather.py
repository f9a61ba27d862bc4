"""Reads the facts of this machine, without judging them. A missing part raises nothing."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from importlib.metadata import distributions
from importlib.util import find_spec
from pathlib import Path

from packaging.utils import canonicalize_name

from verl_credit.recipe.machine.facts import Device, Facts, Memory, Process, Ptxas, Torch

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


def gather(environment: Mapping[str, str] | None = None, *, torch: bool = True) -> Facts:
    """Gathers all facts; without ``torch`` the CUDA probe (a few seconds) is left out."""
    return Facts(
        python=sys.version_info[:3],
        packages=installed(),
        torch=probe_torch() if torch else Torch(None),
        memory=memory(),
        driver=driver(),
        cpus=cores(),
        processes=processes(),
        ptxas=assemblers(),
        environment=dict(os.environ if environment is None else environment),
        now=time.time(),
    )


def cores() -> int:
    """The number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def installed() -> dict[str, str]:
    """Returns versions by distribution; of two distributions with one name the first on the path wins, as for an import."""
    by_name: dict[str, str] = {}
    for distribution in distributions():
        name = distribution.metadata["Name"]
        if name:
            by_name.setdefault(canonicalize_name(name), distribution.version)
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
    process = subprocess.Popen(
        [sys.executable, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,  # so that its children, such as compilers, end with it
    )
    try:
        output, _ = process.communicate(timeout=timeout_s)
        return process.returncode, output
    except subprocess.TimeoutExpired:
        _end(process)
        return None, process.communicate()[0] or ""
    except BaseException:
        _end(process)
        raise


def _end(process: subprocess.Popen) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def driver() -> str:
    """The CUDA version in nvidia-smi's heading; "" without a driver."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return ""
    try:
        output = subprocess.run([tool], capture_output=True, text=True, timeout=20).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""
    match = re.search(r"CUDA Version:\s*(\d+\.\d+)", output)
    return match[1] if match else ""


def memory(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> Memory:
    import psutil  # imported here, because the plan of a GPU machine does not need it

    from verl_credit_retriever.index.memory import cgroup_limits

    now = psutil.virtual_memory()
    # psutil's "available" is MemAvailable: free memory and files that can be dropped
    limit, used = min(cgroup_limits(proc, cgroups), default=(None, 0))
    if limit is not None and limit >= now.total:
        limit = None
    shm = shutil.disk_usage("/dev/shm") if Path("/dev/shm").is_dir() else None
    return Memory(now.total, now.available, limit, used, *((shm.total, shm.free) if shm else (0, 0)))


def processes() -> tuple[Process, ...]:
    """All visible processes except zombies."""
    import psutil

    def read(p) -> Process:
        with p.oneshot():
            known = p.pid, p.ppid(), p.name(), tuple(p.cmdline()), p.username(), p.create_time()
            return Process(*known, p.memory_info().rss)

    alive = []
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):  # the process ended meanwhile, or may not be read
            if process.status() != psutil.STATUS_ZOMBIE:
                alive.append(read(process))
    return tuple(alive)


def assemblers() -> tuple[Ptxas, ...]:
    """triton's ptxas and those of this machine's CUDA toolkits, if they run."""
    spec = find_spec("triton")
    roots = list(spec.submodule_search_locations or []) if spec else []
    bundled = [
        Path(root) / "backends/nvidia/bin" / name for root in roots for name in ("ptxas", "ptxas-blackwell")
    ]
    toolkits = [Path(os.environ[k]) / "bin/ptxas" for k in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(k)]
    toolkits += sorted(Path("/usr/local").glob("cuda*/bin/ptxas"))
    if on_path := shutil.which("ptxas"):
        toolkits.append(Path(on_path))
    chosen = [os.environ.get(key) for key in ("TRITON_PTXAS_PATH", "TRITON_PTXAS_BLACKWELL_PATH")]
    toolkits += [Path(path) for path in chosen if path]
    working = []
    for path in dict.fromkeys([*bundled, *toolkits]):
        version = ptxas_version(path)
        if version is not None:
            own = path in bundled
            working.append(Ptxas(str(path), version, own, own and path.name == "ptxas-blackwell"))
    return tuple(working)


def ptxas_version(path: Path) -> tuple[int, int] | None:
    """Returns (12, 9) for "release 12.9" in ``ptxas --version``; None when ptxas does not run."""
    try:
        output = subprocess.run([str(path), "--version"], capture_output=True, text=True, timeout=20).stdout
    except (OSError, subprocess.TimeoutExpired):
        return None
    match = re.search(r"release (\d+)\.(\d+)", output)
    return (int(match[1]), int(match[2])) if match else None
