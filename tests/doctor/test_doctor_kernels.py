"""The attention kernels are tried, and a trial that fails is judged by whether the recipe needs it."""

import json
from dataclasses import replace

import pytest
from omegaconf import OmegaConf

from kit.machine import FAIL, LAPTOP, MACHINE, PASS, SKIP, WARN, on_cuda, says
from kit.recipes import load_config
from verl_credit.doctor.context import Context
from verl_credit.doctor.hardware import kernels
from verl_credit.machine.facts import Torch

AGREES = (0, "some warning\nagrees: it (within 0.01 of the definition)\n")
NEVER = None  # the trial that must not be started
NO_KERNEL = (1, "Traceback\nRuntimeError: no kernel image is available\n")
NO_BACKEND = (1, "RuntimeError: no attention kernel works for 'credit_sdpa': sdpa: No available kernel")
INSTALLED = replace(MACHINE, packages={"flash-attn": "2.8.3"})
NO_DEVICE = replace(INSTALLED, torch=Torch("2.11.0", "13.0"))
MODEL = "actor_rollout_ref.model.path"
LAB = load_config("lab", [])


@pytest.fixture
def cuda():
    return on_cuda(LAB)


@pytest.mark.parametrize(
    "kernel, attention, facts, answer, status, texts",
    [
        ("flash", "auto", INSTALLED, AGREES, PASS, ["flash-attn 2.8.3 runs on 32 heads of queries", "within 0.01"]),
        ("flash", "auto", INSTALLED, NO_KERNEL, WARN,
         ["does not run: RuntimeError: no kernel image", "attn_implementation=auto"]),
        ("flash", "auto", INSTALLED, (0, "agrees: x\nand more"), WARN, ["does not run"]),
        ("flash", "auto", INSTALLED, (-11, ""), WARN, ["no output"]),
        ("flash", "auto", NO_DEVICE, NEVER, SKIP, ["no CUDA device to run it on"]),
        ("flash", "auto", MACHINE, NEVER, SKIP, ["not installed"]),
        ("flash", "credit_varlen", INSTALLED, NO_KERNEL, FAIL, []),
        ("flash", "credit_varlen", MACHINE, NEVER, FAIL, ["not installed, and"]),
        ("flash", "flash_attention_2", INSTALLED, NO_KERNEL, FAIL, []),
        ("flash", "flash_attention_2", MACHINE, NEVER, FAIL, ["not installed, and"]),
        ("sdpa", "auto", MACHINE, AGREES, PASS, ["SDPA runs on 32 heads of queries, 8 of keys, 128 wide"]),
        ("sdpa", "auto", MACHINE, NO_BACKEND, FAIL, ["No available kernel", "fused backends"]),
        ("sdpa", "auto", INSTALLED, NO_BACKEND, WARN, []),
        ("sdpa", "auto", LAPTOP, NEVER, SKIP, []),
        ("sdpa", "credit_flex", MACHINE, NEVER, SKIP, ["attn_implementation=credit_flex"]),
        ("flex", "auto", MACHINE, NEVER, SKIP, ["auto takes flash-attn or SDPA before it"]),
        ("flex", "credit_flex", MACHINE, AGREES, PASS, []),
        ("flex", "credit_flex", MACHINE, (None, "compiling\n"), FAIL, ["not done after 240 s (compiling)"]),
        ("flex", "credit_flex", MACHINE, (1, "PTXASError: sm_121a"), FAIL, ["PTXASError: sm_121a", "ptxas"]),
        ("flex", "credit_flex", LAPTOP, NEVER, SKIP, []),
    ],
)  # fmt: skip
def test_a_kernel_has_to_run_and_not_only_to_import(cuda, kernel, attention, facts, answer, status, texts):
    """With the heads of Qwen3-4B."""

    def trial(name, heads):
        assert (name, heads) == ({"flash": kernels.VARLEN}.get(kernel, f"credit_{kernel}"), (32, 8, 128))
        return answer

    OmegaConf.update(cuda, MODEL, "Qwen/Qwen3-4B")
    OmegaConf.update(cuda, kernels.ATTENTION, attention)
    check = getattr(kernels, f"check_{kernel}")
    assert says(check(Context(facts, cuda), trial), status, *texts)


@pytest.mark.slow
def test_the_trials_themselves_run(cuda):
    """The true ones, in processes of their own, of both kernels that `auto` may take; on the CPU, without flash-attn."""
    OmegaConf.update(cuda, MODEL, "no such model")
    context = Context(INSTALLED, cuda)

    def on_the_cpu(name, heads):
        assert heads == kernels.HEADS
        return kernels.run_trial(name, (4, 2, 16), "cpu")

    assert says(kernels.check_sdpa(context, on_the_cpu), PASS, "bf16: sdpa (within 0.0")
    missing = "no attention kernel works for 'credit_varlen': varlen: ModuleNotFoundError: No module named 'flash_attn'"
    assert says(kernels.check_flash(context, on_the_cpu), WARN, missing)


def test_the_trial_has_the_heads_of_the_recipes_model(cuda, tmp_path):
    shape = {"hidden_size": 64, "num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 24}
    shape |= {"model_type": "qwen3", "num_hidden_layers": 1, "intermediate_size": 8, "vocab_size": 9}
    (tmp_path / "config.json").write_text(json.dumps(shape))
    OmegaConf.update(cuda, MODEL, str(tmp_path))
    assert kernels.heads_of(cuda) == (6, 3, 24)
    OmegaConf.update(cuda, MODEL, "Qwen/Qwen3-0.6B")
    assert kernels.heads_of(cuda) == (16, 8, 128)
    assert kernels.heads_of(None) == kernels.HEADS
