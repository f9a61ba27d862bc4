"""What a layer's attention costs with `credit_sdpa`, which calls torch once per row, when a pack has many short rows.

    python evidence/information_gain/short_rows.py [--device cpu|cuda]

Heads of Qwen3-4B (32 of queries, 8 of keys, size 128), forward and backward, medians of 5. The calls alone: as many rows of
one token, which leave almost nothing to compute. On a CPU: float32, CPU seconds of one thread; on a GPU: bfloat16, seconds.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch

from verl_credit.policy.attention.pack import pack_rows
from verl_credit.policy.attention.sdpa import sdpa

SHAPES = [(40, 25), (40, 100), (1, 1000)]


def seconds(rows: int, tokens: int, device: str) -> float:
    pack, dtype = pack_rows([tokens] * rows), torch.float32 if device == "cpu" else torch.bfloat16
    leaves = [
        torch.randn(1, heads, rows * tokens, 128, device=device, dtype=dtype, requires_grad=True)
        for heads in (32, 8, 8)
    ]
    clock, found = time.process_time if device == "cpu" else time.perf_counter, []
    for _ in range(6):  # the first makes the pack's tables
        begun = clock()
        sdpa(*leaves, pack, scaling=128**-0.5).sum().backward()
        if device != "cpu":
            torch.cuda.synchronize()
        found.append(clock() - begun)
    return statistics.median(found[1:])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cpu")
    device = parser.parse_args().device
    torch.set_num_threads(1)
    for rows, tokens in SHAPES:
        whole, calls = seconds(rows, tokens, device), seconds(rows, 1, device)
        print(
            f"{rows} rows of {tokens}: {1e3 * whole:.1f} ms, the calls alone {1e3 * calls:.2f} ms, {calls / whole:.1%}"
        )


if __name__ == "__main__":
    main()
