"""Compares every kernel with the definition in float64, and with eager attention in the kernel's own precision.

A pack of two rows with N tokens in all, the first with branches whose bases are before, on and after borders of 128 tokens;
32 heads, 8 key heads; values, and gradients of queries, keys and values. The error is the largest difference, relative
where values exceed 1, as at the start of a run. Peak memory is above the inputs, forward and backward; times are medians
of 5.
"""

from __future__ import annotations

import statistics
import time

import torch

from gpu.models import give_back, kernels
from gpu.record import at_most
from verl_credit.policy.attention.kernels import KERNELS, TOLERANCE, Heads, row_by_row
from verl_credit.policy.attention.pack import pack_rows

HEADS, KEY_HEADS = 32, 8
OPTIONS = {"plain": {}, "window": {"window": 300}, "softcap": {"softcap": 20.0}}
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
UNFUSED = 2.8  # x heads x tokens² x 4 bytes: FlexAttention that was not compiled
GRAPHS = 2  # of flex: without and with gradients, each for all lengths, answers and windows
SOURCE = "verl_credit/policy/attention/kernels.py: TOLERANCE; tests/policy/test_attention_flex.py"


def run(setting, record) -> None:
    sizes, head_dim = ((600,), 16) if setting.tiny else ((600, 2048, 8192), 128)
    for name, dtype in DTYPES.items():
        why = kernels(setting, dtype, Heads(HEADS, KEY_HEADS, head_dim))
        for kernel in KERNELS:
            if why[kernel]:
                record.not_run(f"{kernel}, {name}", why[kernel])
        able = [kernel for kernel in KERNELS if not why[kernel]]
        met: set[tuple[str, bool]] = set()
        for option, given in OPTIONS.items():
            for tokens in sizes:
                title = f"{name}, {tokens} tokens, {option}"
                case = Case(tokens, head_dim, dtype, setting.device, given)
                todo = [kernel for kernel in able if not record.has(f"{kernel}, {title}")]
                exact = case.apart(torch.float64) if todo else None
                eager = case.difference(case.apart(dtype), exact) if todo else None
                for kernel in todo:
                    try:
                        found = case.measure(kernel, exact) | {"eager_error": eager}
                    except Exception as error:  # out of memory, or what compilers raise
                        record.off(f"{kernel}, {title}", error)
                        continue
                    finally:
                        give_back(setting.device)
                    met_before = (kernel, "softcap" in given) in met
                    predicted = _predicted(found, dtype, met_before, tokens)
                    record.add(f"{kernel}, {title}", found, predicted, SOURCE)
                    met.add((kernel, "softcap" in given))


def _predicted(found: dict, dtype, met_before: bool, tokens: int) -> dict:
    """Long rows accumulate more rounding than at the start, so three times eager's own error is also accepted.

    On a CPU nothing is compiled, and no peak is measured.
    """
    predicted = {"error": at_most(max(TOLERANCE[dtype], 3 * found["eager_error"]))}
    if "peak_gib" in found:
        predicted["compilations"] = at_most(0 if met_before else GRAPHS)
    if "peak_gib" in found and tokens > 1000:
        predicted["peak_gib"] = at_most(UNFUSED * HEADS * tokens**2 * 4 / 2**30)
    return predicted


class Case:
    """Inputs of one size, and the measurements on them."""

    def __init__(self, tokens: int, head_dim: int, dtype: torch.dtype, device: str, options: dict):
        trunk = tokens * 3 // 4
        bases = [trunk, trunk - 1, *(b for b in (1, 127, 128, 129, 256, trunk // 2, 1024) if b < trunk - 1)]
        branches = [(base, 12) for base in sorted(set(bases), reverse=True)]
        self.pack = pack_rows([trunk, tokens - trunk - 12 * len(branches)], [branches, []])
        self.device, self.options = device, {"scaling": head_dim**-0.5, **options}
        random = torch.Generator().manual_seed(tokens)
        draw = lambda heads: torch.randn(1, heads, self.pack.length, head_dim, generator=random)  # noqa: E731
        drawn = [draw(HEADS), draw(KEY_HEADS), draw(KEY_HEADS), draw(HEADS)]
        *self.inputs, weight = (one.to(device, dtype) for one in drawn)
        self.weight = weight.transpose(1, 2)

    @staticmethod
    def _with_gradients(attend, inputs, weight) -> list[torch.Tensor]:
        leaves = [one.clone().requires_grad_() for one in inputs]
        out = attend(*leaves)
        (out * weight).sum().backward()
        return [out.detach(), *(leaf.grad for leaf in leaves)]

    def apart(self, dtype: torch.dtype) -> list[torch.Tensor]:
        """Single rows and branches with explicit scores: the definition in float64, eager in other dtypes.

        One key head at a time, because all scores of 8192 tokens would take 17 GB.
        """
        parts, groups = [], HEADS // KEY_HEADS
        for head in range(KEY_HEADS):
            mine = slice(head * groups, (head + 1) * groups), slice(head, head + 1), slice(head, head + 1)
            inputs = [one[:, heads].to(dtype) for one, heads in zip(self.inputs, mine, strict=True)]
            weight = self.weight[:, :, mine[0]].to(dtype)
            attend = lambda *qkv: row_by_row(*qkv, self.pack.rows, **self.options)  # noqa: E731
            parts.append(self._with_gradients(attend, inputs, weight))
        out, *gradients = zip(*parts, strict=True)
        return [torch.cat(out, dim=2), *(torch.cat(one, dim=1) for one in gradients)]

    def difference(self, ours: list[torch.Tensor], exact: list[torch.Tensor]) -> float:
        apart = [
            ((a.double() - b).abs() / b.abs().clamp(min=1)).max() for a, b in zip(ours, exact, strict=True)
        ]
        return float(torch.stack(apart).max())

    def measure(self, kernel: str, exact: list[torch.Tensor]) -> dict:
        """Measure in a run's order: without gradients (old_log_probs), then with them (the update)."""
        attend = lambda *qkv: KERNELS[kernel](*qkv, self.pack, **self.options)  # noqa: E731
        before = compilations()
        with torch.no_grad():
            values = attend(*self.inputs)
        if self.device == "cpu" and kernel == "flex":
            error = self.difference([values], exact[:1])
            return {"error": error, "compilations": compilations() - before, "gradients": "none on a CPU"}
        error = self.difference(self._with_gradients(attend, self.inputs, self.weight), exact)
        found = {"error": error, "compilations": compilations() - before}
        if self.device == "cpu":
            return found
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
        self._with_gradients(attend, self.inputs, self.weight)
        torch.cuda.synchronize()
        found["peak_gib"] = (torch.cuda.max_memory_allocated() - held) / 2**30
        taken = []
        for _ in range(5):
            start = time.perf_counter()
            self._with_gradients(attend, self.inputs, self.weight)
            torch.cuda.synchronize()
            taken.append(time.perf_counter() - start)
        return found | {"ms": 1000 * statistics.median(taken)}


def compilations() -> int:
    """Graphs that Dynamo has compiled in this process."""
    from torch._dynamo.utils import counters

    return counters["stats"]["unique_graphs"]
