"""How torch computes on this CPU: in the precision that it multiplies fastest, or with one thread."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

BF16 = ("amx_bf16", "avx512_bf16")


def cpu_precision() -> str:
    """``bf16`` where the CPU has instructions for it, else ``fp32``.

    Without them torch emulates bf16: a training step of 135 million parameters then takes 12 to 17 times as long as in
    fp32 (evidence/real). Arm CPUs always get ``fp32``; neither precision was measured there.
    """
    import torch

    has = torch.cpu.get_capabilities()
    return "bf16" if any(has.get(name) for name in BF16) else "fp32"


@contextmanager
def one_thread() -> Iterator[None]:
    """Limits torch to one thread: a model as small as the lab's waits for several threads longer than it computes."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
