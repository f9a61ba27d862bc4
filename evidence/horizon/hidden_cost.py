"""What a fit with hidden states costs (docs/turn-values.md): drawn states with a replay of four steps.

python evidence/horizon/hidden_cost.py
"""

from __future__ import annotations

import resource
import time

import torch

from verl_credit.credit.turn.values import States, crossfit


def drawn(count: int, width: int, seed: int) -> States:
    draw = torch.Generator().manual_seed(seed)
    small = torch.randn(count, 12, generator=draw, dtype=torch.float64)
    returns = torch.randn(count, generator=draw, dtype=torch.float64)
    hidden = torch.randn(count, width, generator=draw).bfloat16()
    return States(small, returns, torch.arange(count) // 24, hidden)


def main() -> None:
    for count, width, folds in ((640, 128, 8), (768, 896, 8), (3072, 2560, 2)):
        now, replay = drawn(count, width, 0), drawn(4 * count, width, 1)
        began = time.process_time()
        crossfit(now, replay, torch.zeros(count, dtype=torch.float64), shrink=0.03, folds=folds)
        seconds, peak = time.process_time() - began, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
        print(f"{count} states of {width}, {folds} folds: {seconds:.1f} s of CPU, {peak:.1f} GB", flush=True)


if __name__ == "__main__":
    main()
