"""What the machine has, in processes of their own, so that none of them holds the GPU when a run starts."""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from gpu.half_hour.order import HF, VLLM
from gpu.record import FOUND, Record

GIB = 2**30
LEAST_DISK_GIB = 40  # weights of both models, and two checkpoints of a LoRA run with its whole base
SMOKE_S, CEILINGS_S = 150, 120
PLANNED_FOR = {"H100": "h100", "H200": "h200", "H20": "h20", "A100": "a100", "GB10": "gb10"}
SMOKE = """
import sys
from vllm import LLM, SamplingParams
engine = LLM(sys.argv[1], dtype="bfloat16", max_model_len=512, gpu_memory_utilization=0.3, enforce_eager=True, seed=0)
found = engine.generate([{"prompt_token_ids": [1, 2, 3, 4]}], SamplingParams(max_tokens=8, ignore_eos=True), use_tqdm=False)
assert len(found[0].outputs[0].token_ids) == 8, found
"""


def room(path: Path) -> float:
    """Free GiB of the file system that holds the path."""
    while not path.exists():
        path = path.parent
    return shutil.disk_usage(path).free / GIB


def machine(record: Record, facts: Mapping, device: str, work: Path, memory: Path) -> None:
    """Rows of what is here and what is missing; nothing of it ends the half hour."""
    found = {name: facts[name] for name in ("device", "gpus", "memory_gib", "python")} | dict(
        facts["software"]
    )
    found |= {"free_disk_gib": round(room(work), 1), f"free_{memory.name}_gib": round(room(memory), 1)}
    record.add("machine", found)
    if device != "cuda":
        return
    if not facts["gpus"]:
        record.off("device", no_gpu(facts))
    if found["free_disk_gib"] < LEAST_DISK_GIB:
        record.off(
            "disk",
            f"{found['free_disk_gib']} GiB free below {work}, {LEAST_DISK_GIB} are needed for all runs",
        )


def no_gpu(facts: Mapping) -> str:
    return f"torch {facts['software'].get('torch')} sees no GPU: {facts['no_gpu']}"


def hardware(facts: Mapping) -> list[str]:
    """`plan`'s device by what is here: its name, its memory, and whether flash-attn is installed."""
    if not facts["gpus"]:
        return []
    name = next((ours for theirs, ours in PLANNED_FOR.items() if theirs in facts["device"]), "h100")
    flash = str("flash-attn" in facts["software"]).lower()
    return [
        f"hardware.name={name}",
        f"+hardware.memory_gib={facts['memory_gib']}",
        f"+hardware.flash_attn={flash}",
    ]


def ceilings(device: str, size: int) -> dict[str, float]:
    """TFLOP/s of a product of two ``size`` x ``size`` matrices in bf16, and GB/s of a copy; the best of five."""
    import torch

    a = torch.randn(size, size, device=device, dtype=torch.bfloat16)
    b = torch.empty_like(a)
    flops, copied = 2 * size**3, 2 * a.numel() * a.element_size()
    return {
        "bf16_tflops": flops / _best(lambda: a @ a, device) / 1e12,
        "copy_gb_s": copied / _best(lambda: b.copy_(a), device) / 1e9,
    }


def _best(work, device: str) -> float:
    import torch

    taken = []
    for _ in range(6):  # the first warms up
        start = time.perf_counter()
        work()
        if device == "cuda":
            torch.cuda.synchronize()
        taken.append(time.perf_counter() - start)
    return min(taken[1:])


def measure_ceilings(record: Record, child, device: str, tiny: bool) -> None:
    what = f"ceilings({device!r}, {512 if tiny else 8192})"
    code = f"import json; from gpu.half_hour.checks import ceilings; print(json.dumps({what}))"
    ended = child("ceilings", [sys.executable, "-c", code], CEILINGS_S)
    if ended.code != 0:
        record.off("ceilings", ended.why)
    else:
        record.add("ceilings", json.loads(ended.lines[-1]))


def engine(record: Record, child, facts: Mapping, device: str, weights: Path | None) -> str:
    """vLLM if it is here and writes eight tokens, else transformers for the whole queue; the row says which and why."""
    if device == "cpu":
        record.not_run("engine", "vLLM is not asked for on a CPU: transformers roll out")
        return HF
    if "vllm" not in facts["software"]:
        record.off("engine", f"vLLM is not installed: rollout.name={HF} in every run")
        return HF
    if weights is None:
        record.not_run("engine", "no weights for a smoke test: vLLM is taken as it is")
        return VLLM
    ended = child("smoke", [sys.executable, "-c", SMOKE, str(weights)], SMOKE_S)
    if ended.code == 0:
        record.add("engine", {"engine": VLLM, "tokens": 8, "seconds": ended.seconds})
        return VLLM
    record.off("engine", f"vLLM writes no token: rollout.name={HF} in every run; {ended.why}")
    return HF


def tflops(record: Record) -> float | None:
    row = next(
        (row for row in record.content["rows"] if row["name"] == "ceilings" and row["verdict"] == FOUND), None
    )
    return row and row["found"]["bf16_tflops"]
