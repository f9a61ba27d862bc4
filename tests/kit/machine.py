"""Invented facts about a laptop and a GPU machine, and what a check says of them."""

from __future__ import annotations

from dataclasses import replace

from verl_credit.doctor.result import Status
from verl_credit.machine.facts import GIB, Device, Facts, Memory, Torch

PASS, WARN, FAIL, SKIP = Status.PASS, Status.WARN, Status.FAIL, Status.SKIP


H100 = Device("NVIDIA H100", (9, 0), 80 * GIB, 79 * GIB)


GB10 = Device("NVIDIA GB10", (12, 1), 121 * GIB, 10 * GIB)


MACHINE = Facts(
    python=(3, 11, 9),
    packages={"ray": "2.60.0", "vllm": "0.24.0", "verl": "0.9.1"},
    torch=Torch("2.11.0", "13.0", (H100,)),
    memory=Memory(128 * GIB, 100 * GIB, shm_total=64 * GIB, shm_free=64 * GIB),
    driver="13.0",
    cpus=16,
    now=10_000.0,
)


LAPTOP = replace(MACHINE, torch=Torch("2.13.0+cpu"), driver="", packages={"ray": "2.60.0"})


def says(result, status, *texts):
    told = " | ".join((result.found, result.right, result.mend))
    assert result.status is status, told
    assert all(text in told for text in texts), told
    return True
