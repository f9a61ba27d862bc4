"""What the scripts of this folder share: their arguments, the machine's facts, and intervals over questions."""

from __future__ import annotations

import argparse
import json
import os
import platform
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import numpy as np
from scipy import stats

HERE = Path(__file__).resolve().parent


def arguments(doc: str, name: str) -> argparse.ArgumentParser:
    """A parser with --real, --questions and --json (default: ``name``.json beside the scripts)."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--real", type=Path, required=True, help="folder with policy/ and encoder/")
    parser.add_argument("--questions", type=Path, required=True, help="hotpotqa_dev_distractor_70.json")
    parser.add_argument("--json", type=Path, default=HERE / f"{name}.json")
    return parser


def machine(*packages: str) -> dict:
    """The processor, its cores, and versions of Python and of these packages."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    facts = dict(line.split("\t", 1) for line in lines if "\t" in line)
    flags = facts.get("flags", "").split()
    return {
        "processor": facts.get("model name", platform.processor()).strip(" :\t"),
        "architecture": platform.machine(),
        "bf16_matrix_products": "amx_bf16" in flags or "avx512_bf16" in flags,
        "cores": os.cpu_count(),
        "threads_used": 1,
        "python": platform.python_version(),
        "packages": {name: version(name) for name in packages},
    }


def write(path: Path, content: dict) -> None:
    """JSON with a line for every key, and for every row of a list."""
    lines = []
    for key, value in content.items():
        rows = [json.dumps(row, allow_nan=False) for row in value] if isinstance(value, list) else []
        text = "[\n  " + ",\n  ".join(rows) + "\n ]" if rows else json.dumps(value, allow_nan=False)
        lines.append(f" {json.dumps(key)}: {text}")
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def with_interval(n: int, statistic: Callable[[np.ndarray], float], resamples: int = 2000) -> dict:
    """``statistic`` of all of ``n`` questions with its 95 % BCa bootstrap interval over questions.

    ``statistic`` takes numbers of questions, repeated ones included. The interval is None where all resamples agree.
    """
    everything = np.arange(n)
    found = stats.bootstrap(
        (everything,), statistic, method="BCa", n_resamples=resamples, vectorized=False, rng=0
    ).confidence_interval
    interval = [float(found.low), float(found.high)]
    defined = all(np.isfinite(interval))
    return {"n": n, "value": float(statistic(everything)), "interval": interval if defined else None}
