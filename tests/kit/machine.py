"""Invented facts about a laptop and a GPU machine, and what a check says of them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from omegaconf import OmegaConf

from verl_credit.recipe.doctor.context import Context
from verl_credit.recipe.doctor.status import Status
from verl_credit.recipe.this_machine import GIB, Device, Facts, Memory, Torch

PASS, WARN, FAIL, SKIP = Status.PASS, Status.WARN, Status.FAIL, Status.SKIP


H100 = Device("NVIDIA H100", (9, 0), 80 * GIB, 79 * GIB)


GB10 = Device("NVIDIA GB10", (12, 1), 121 * GIB, 10 * GIB)


MACHINE = Facts(
    packages={"ray": "2.60.0", "vllm": "0.24.0", "verl": "0.9.1"},
    torch=Torch("2.11.0", "13.0", (H100,)),
    memory=Memory(128 * GIB, 100 * GIB),
    driver="13.0",
    cpus=16,
)


LAPTOP = replace(MACHINE, torch=Torch("2.13.0+cpu"), driver="", packages={"ray": "2.60.0"})


def says(result, status, *texts):
    told = " | ".join((result.found, result.right, result.fix))
    assert result.status is status, told
    assert all(text in told for text in texts), told
    return True


def on_cuda(config, **changes):
    """The lab's recipe as it would ask a GPU for vLLM; inner keys of changes written trainer__nnodes=2."""
    config = config.copy()
    vllm = {
        "trainer.device": "cuda",
        "actor_rollout_ref.rollout.name": "vllm",
        "actor_rollout_ref.rollout.gpu_memory_utilization": 0.5,
        **{f"ray_kwargs.ray_init.{key}": None for key in ("num_cpus", "num_gpus", "object_store_memory")},
    }
    for key, value in {**vllm, **changes}.items():
        OmegaConf.update(config, key.replace("__", "."), value, force_add=True)
    return config


def cases(check, *rows, place=None):
    """A test of ``check`` for each row: facts, config, status, what the result says. ``place``: of several results."""

    @pytest.mark.parametrize("facts, config, status, texts", [(f, c, s, texts) for f, c, s, *texts in rows])
    def test(facts, config, status, texts):
        found = check(Context(facts, config))
        assert says(found if place is None else found[place], status, *texts)

    return test
