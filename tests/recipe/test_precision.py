"""``param_dtype=auto`` is what the device multiplies fastest, and a precision that the CPU does in software is warned of."""

import pytest
import torch

from verl_credit.precision import cpu_precision
from verl_credit.recipe.compose import load_config
from verl_credit.recipe.decisions import COMPUTES_IN, compute_dtype

CPUS = [
    ({"avx2": True, "avx512_f": True}, "fp32"),
    ({"amx_bf16": True}, "bf16"),
    ({"avx512_bf16": True}, "bf16"),
    ({}, "fp32"),
]


@pytest.fixture
def cpu(monkeypatch):
    return lambda has: monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: has)


@pytest.mark.parametrize(("has", "expected"), CPUS)
def test_a_cpu_with_instructions_for_bf16_computes_in_it(cpu, has, expected):
    cpu(has)
    assert cpu_precision() == expected
    config = load_config("real_math_cpu", [])
    assert compute_dtype(config) == expected
    assert config.actor_rollout_ref.rollout.dtype == {"bf16": "bfloat16", "fp32": "float32"}[expected]


@pytest.mark.slow
def test_a_gpu_computes_in_bf16_whatever_the_cpu(cpu):
    cpu({})
    config = load_config("real_math_cpu", ["hardware=h100x1"])
    assert (compute_dtype(config), config.actor_rollout_ref.rollout.dtype) == ("bf16", "bfloat16")


def test_what_is_given_stays(cpu):
    cpu({})
    config = load_config("real_math_cpu", [f"{COMPUTES_IN}=bf16", "actor_rollout_ref.rollout.dtype=bfloat16"])
    assert (compute_dtype(config), config.actor_rollout_ref.rollout.dtype) == ("bf16", "bfloat16")
