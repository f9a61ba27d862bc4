"""The precision in which this CPU multiplies fastest."""

from __future__ import annotations

import torch

BF16 = ("amx_bf16", "avx512_bf16")


def cpu_precision() -> str:
    """``bf16`` where the CPU has instructions for it, else ``fp32``.

    Without them torch emulates bf16: a training step of 135 million parameters then takes 12 to 17 times as long as in
    fp32 (evidence/real). Arm CPUs always get ``fp32``; neither precision was measured there.
    """
    has = torch.cpu.get_capabilities()
    return "bf16" if any(has.get(name) for name in BF16) else "fp32"
