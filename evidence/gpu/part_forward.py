"""The cost of gains beside the plain forward, for every kernel: the table of evidence/information_gain/forward.py.

Ratios of seconds to `plain`, a row's forward with its log-probs, and of peak memory above the model.
"""

from __future__ import annotations

from types import SimpleNamespace

import torch

from gpu.models import forward_script, give_back, heads_of, kernels, random_model, shape_for
from gpu.record import at_most
from verl_credit.policy.attention.implementation import forced

LIMITS = {(1024, 4): 1.25, (4096, 8): 1.10}
MEMORY = 1.25
SOURCE = "evidence/information_gain/README.md"


def run(setting, record) -> None:
    script, shape = forward_script(), shape_for(setting)
    dtype = torch.float32 if setting.device == "cpu" else torch.bfloat16
    shapes = [(256, 3)] if setting.tiny else script.SHAPES
    arguments = SimpleNamespace(
        device=setting.device, vocabulary=shape.vocabulary, repeats=1 if setting.tiny else 7
    )
    model = random_model(shape, setting.device, dtype)
    for kernel, why in kernels(setting, dtype, heads_of(model.config)).items():
        if why:
            record.not_run(kernel, why)
            continue
        for length, turns in shapes:
            title = f"{kernel}, {length} tokens, {turns} turns"
            if record.has(title):
                continue
            try:
                with forced(kernel):
                    found = script.time_shape(arguments, model, length, turns)
                    found |= _memory(script, arguments, model, length, turns)
            except Exception as error:  # out of memory, or what compilers raise
                record.off(title, error)
                continue
            finally:
                give_back(setting.device)
            # seconds of so little work are not meaningful
            left_out = ("plain_s", "branch_ratio", "rows_ratio", "padded_ratio") if setting.tiny else ()
            found = {k: v for k, v in found.items() if not k.startswith(("length", "turns", *left_out))}
            record.add(title, found, _predicted(setting, length, turns), SOURCE)


def _predicted(setting, length: int, turns: int) -> dict:
    if setting.tiny:
        return {"branch_to_rows_largest_difference": at_most(1e-4)}
    limit = LIMITS.get((length, turns))
    return {"branch_memory_ratio": at_most(MEMORY)} | ({"branch_ratio": at_most(limit)} if limit else {})


def _memory(script, arguments, model, length: int, turns: int) -> dict:
    """Peaks of torch's allocations; nothing on a CPU, where each peak needs its own process."""
    if arguments.device == "cpu":
        return {}
    given, peak = script.inputs(arguments, length, turns), {}
    for method in script.METHODS:
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
        script.run(method, model, *given)
        torch.cuda.synchronize()
        peak[method] = torch.cuda.max_memory_allocated() - held
    ratios = {f"{method}_memory_ratio": peak[method] / peak["plain"] for method in script.METHODS[1:]}
    return {"plain_gib": peak["plain"] / 2**30, **ratios}
