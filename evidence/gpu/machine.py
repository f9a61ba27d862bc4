"""The device, the packages and the version of the code; read in a separate process, so that none holds the GPU."""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("torch", "transformers", "verl", "vllm", "flash-attn", "triton")


def look(device: str) -> dict:
    """{device, gpus, memory_gib, software, python}; ``gpus`` is 0 for ``cpu`` and if torch sees none (``no_gpu``: why)."""
    found = {"python": platform.python_version(), "software": _versions(), "gpus": 0, "memory_gib": None}
    if device == "cpu":
        return found | {"device": f"CPU, {platform.machine()}, {len(os.sched_getaffinity(0))} cores"}
    import torch

    try:
        torch.cuda.init()
    except Exception as error:  # no device, a driver for another CUDA, torch without CUDA
        return found | {"device": "no GPU", "no_gpu": f"{type(error).__name__}: {error}"}
    one = torch.cuda.get_device_properties(0)
    return found | {
        "device": one.name,
        "gpus": torch.cuda.device_count(),
        "memory_gib": round(one.total_memory / 2**30, 1),
        "capability": f"{one.major}.{one.minor}",
        "software": found["software"] | {"cuda": torch.version.cuda},
    }


def here(device: str) -> dict:
    """`look` in a separate process. Raises RuntimeError with its last line."""
    code = f"import json; from gpu.machine import look; print(json.dumps(look({device!r})))"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=300,
    )
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise RuntimeError(f"this machine's facts cannot be read: {last}")
    return json.loads(done.stdout.splitlines()[-1])


def environment() -> dict[str, str]:
    """Variables for child processes, so that they find this folder's package and the project."""
    paths = [str(ROOT), str(ROOT / "evidence"), *filter(None, [os.environ.get("PYTHONPATH")])]
    # vLLM imports flashinfer for its sampler without asking whether it is there.
    sampler = {} if importlib.util.find_spec("flashinfer") else {"VLLM_USE_FLASHINFER_SAMPLER": "0"}
    return {
        **sampler,
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "TOKENIZERS_PARALLELISM": "false",
        "TQDM_DISABLE": "1",
    }


def code_version(patterns: Iterable[str]) -> str:
    """A hash of the files that affect a part's measurements, committed or not."""
    digest = hashlib.sha256()
    for path in sorted({path for pattern in patterns for path in ROOT.glob(pattern)}):
        digest.update(str(path.relative_to(ROOT)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:12]


def slug(device: str, tiny: bool) -> str:
    """Name of the folder of a device's results. One folder for all CPUs, whose results show that the command works."""
    name = "cpu" if device.startswith("CPU") else re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")
    return f"{name}-tiny" if tiny else name


def _versions() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        if importlib.util.find_spec(name.replace("-", "_")) is not None:
            try:
                found[name] = importlib.metadata.version(name)
            except importlib.metadata.PackageNotFoundError:
                found[name] = "?"
    return found
