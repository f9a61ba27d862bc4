"""CUDA devices, their memory, assembler and attention kernels, and whether a recipe fits them; none of them is there."""

import json
from dataclasses import replace

import pytest

from kit.machine import FAIL, GB10, H100, LAPTOP, MACHINE, PASS, SKIP, WARN, cases, on_cuda, says
from kit.recipes import load_config
from verl_credit.errors import TooLargeError
from verl_credit.recipe.doctor import checks, device, machine
from verl_credit.recipe.doctor.context import Context
from verl_credit.recipe.doctor.device import check_plan, plan_here
from verl_credit.recipe.this_machine import GIB, Torch

LAB = load_config("lab", [])
CUDA = on_cuda(LAB)
MODEL = "actor_rollout_ref.model.path"
BROKEN = replace(LAPTOP, torch=Torch("2.11.0", "13.0", error="RuntimeError: driver too old"))
LEADER = replace(LAPTOP, environment={"RAY_ADDRESS": "10.0.0.1:6379"})


def with_devices(*devices, **changes):
    return replace(MACHINE, torch=Torch("2.11.0", "13.0", devices), **changes)


test_cuda = cases(
    device.check_cuda,
    (MACHINE, CUDA, PASS, "NVIDIA H100 (sm_90, 80.0 GiB)", "driver for CUDA 13.0"),
    (LAPTOP, LAB, SKIP, "no CUDA device"),
    (BROKEN, CUDA, FAIL, "no CUDA device is visible", "driver too old", "hardware=laptop"),
    (replace(MACHINE, driver="12.8"), CUDA, FAIL, "a driver for CUDA 13.0"),
    (replace(MACHINE, driver="13.1"), CUDA, PASS),
    (MACHINE, on_cuda(LAB, trainer__n_gpus_per_node=8), FAIL, "n_gpus_per_node=8", "n_gpus_per_node=1"),
    (LEADER, CUDA, SKIP, "the Ray cluster's nodes"),  # a head without a GPU may lead a cluster
)


def with_free(gib):
    return with_devices(replace(H100, free=gib * GIB))


test_memory_of_a_device = cases(
    machine.check_memory,
    (with_free(79), CUDA, PASS),
    (with_free(41), CUDA, WARN, "an idle device"),
    (with_free(39), CUDA, FAIL, "gpu_memory_utilization=0.5", "40.0 GiB"),
    (with_free(39), None, WARN),
    place=1,
)


def test_unified_memory_is_what_the_cpu_side_has():
    """cudaMemGetInfo says 10 GiB, because files in the cache count as used; MemAvailable says 100."""
    facts = with_devices(GB10)
    found = machine.check_memory(Context(facts, CUDA))[1]
    assert says(found, WARN, "100.0 GiB free of 121.0 GiB", "cudaMemGetInfo says 10.0 GiB")
    full = replace(facts, memory=replace(facts.memory, available=60 * GIB))
    assert says(machine.check_memory(Context(full, CUDA))[1], FAIL, "60.0 GiB free", "60.5 GiB")
    large = on_cuda(LAB, **{machine.SHARE: 0.6})
    assert says(machine.check_memory(Context(facts, large))[1], WARN, f"{machine.SHARE}=0.3")
    limited = replace(facts, memory=replace(facts.memory, limit=32 * GIB, limit_used=2 * GIB))
    assert machine.device_free(GB10, limited) == 30 * GIB


@pytest.mark.parametrize(
    "changes, unified",
    [({}, False), ({"integrated": True}, True), ({"name": "NVIDIA GB10"}, True), ({"capability": (12, 1)}, True),
     ({"capability": (12, 0)}, False)],
)  # fmt: skip
def test_which_memory_is_unified(changes, unified):
    assert replace(H100, **changes).unified is unified


GIVEN = ["data.train_files=t", "data.val_files=v", "search.url=http://127.0.0.1:8000"]
ALONE = [*GIVEN, "hardware=h100x1"]
EIGHT = with_devices(*[H100] * 8)


@pytest.mark.parametrize(
    "facts, overrides, status, texts",
    [
        (EIGHT, GIVEN, PASS, ["7.5 GiB weights"]),
        (MACHINE, ALONE, WARN, ["59.9 GiB weights", "lora_rank"]),
        (MACHINE, [*ALONE, "model=qwen3_8b"], FAIL, ["122.1 GiB weights", "at most", "lora_rank"]),
        (EIGHT, [*GIVEN, f"{MODEL}=some/where"], SKIP, ["cannot be planned", "some/where"]),
    ],
)
def test_room_for_what_the_recipe_holds(facts, overrides, status, texts):
    """Qwen3-4B in fp32 with gradients and moments: 16 bytes x 4.02e9 = 60 GiB on one device, an eighth on eight."""
    config = load_config("multihop_qwen3_4b", overrides)
    assert says(check_plan(Context(facts, config)), status, *texts)


def test_train_refuses_what_does_not_fit_by_an_error_of_its_own(monkeypatch):
    """A trial that was refused for its size is labelled so."""
    monkeypatch.setattr(checks, "CHECKS", [one for one in checks.CHECKS if one.name == "room"])
    config = load_config("multihop_qwen3_4b", [*ALONE, "model=qwen3_8b"])
    with pytest.raises(TooLargeError, match="^room: .*122.1 GiB weights"):
        checks.require(Context(MACHINE, config), checks.Stage.MACHINE)


test_room_where_there_is_nothing_to_say = cases(
    check_plan, (LAPTOP, LAB, SKIP, "on a CPU"), (LAPTOP, CUDA, SKIP, "no device")
)


def test_a_unified_device_is_planned_as_one_whatever_the_recipe_was_made_for():
    spark = load_config("spark_qwen3_4b", GIVEN)
    (found,) = [
        p for p in plan_here(load_config("multihop_qwen3_4b", ALONE), GB10).phases if p.name == "rollout"
    ]
    assert found.capacity == GB10.total and "host: processes" in found.parts
    assert "host: processes" not in plan_here(spark, H100).phases[0].parts


AGREES = (0, "some warning\nagrees: it (within 0.01 of the definition)\n")
NEVER = None  # the trial that must not be started
NO_KERNEL = (1, "Traceback\nRuntimeError: no kernel image is available\n")
NO_BACKEND = (1, "RuntimeError: no attention kernel works for 'credit_sdpa': sdpa: No available kernel")
INSTALLED = replace(MACHINE, packages={"flash-attn": "2.8.3"})
NO_DEVICE = replace(INSTALLED, torch=Torch("2.11.0", "13.0"))


@pytest.mark.parametrize(
    "attention, facts, answer, statuses, text",
    [
        ("auto", INSTALLED, AGREES, [PASS, PASS], "runs on 32 heads of queries, 8 of keys, 128 wide"),
        ("auto", INSTALLED, NO_KERNEL, [WARN, WARN], "does not run: RuntimeError: no kernel image"),
        ("auto", INSTALLED, (0, "agrees: x\nand more"), [WARN, WARN], "does not run"),
        ("auto", INSTALLED, (-11, ""), [WARN, WARN], "no output"),
        ("auto", NO_DEVICE, NEVER, [SKIP], "no CUDA device"),
        ("auto", MACHINE, NO_BACKEND, [FAIL], "No available kernel"),
        ("credit_varlen", INSTALLED, NO_KERNEL, [FAIL], "attn_implementation=auto"),
        ("credit_varlen", MACHINE, NEVER, [FAIL], "attn_implementation=credit_varlen"),
        ("flash_attention_2", INSTALLED, AGREES, [PASS], "credit_varlen runs"),
        ("credit_sdpa", INSTALLED, NO_BACKEND, [FAIL], "fused backends"),
        ("credit_flex", MACHINE, (None, "compiling\n"), [FAIL], "not done after 240 s (compiling)"),
        ("credit_flex", MACHINE, (1, "PTXASError: sm_121a"), [FAIL], "PTXASError: sm_121a"),
        ("credit_flex", LAPTOP, NEVER, [SKIP], ""),
    ],
)
def test_a_kernel_has_to_run_and_not_only_to_import(attention, facts, answer, statuses, text):
    """With the heads of Qwen3-4B."""

    def trial(name, heads):
        assert heads == (32, 8, 128) and answer is not NEVER
        return answer

    config = on_cuda(LAB, **{MODEL: "Qwen/Qwen3-4B", device.ATTENTION: attention})
    found = device.check_attention(Context(facts, config), trial)
    found = found if isinstance(found, list) else [found]
    assert [one.status for one in found] == statuses
    assert all(says(one, one.status, text) for one in found)


@pytest.mark.slow
def test_the_trials_themselves_run():
    """The true ones, in processes of their own, of both kernels that `auto` may take; on the CPU, without flash-attn."""
    context = Context(INSTALLED, on_cuda(LAB, **{MODEL: "no such model"}))

    def on_the_cpu(name, heads):
        assert heads == device.HEADS
        return device.run_trial(name, (4, 2, 16), "cpu")

    flash, sdpa = device.check_attention(context, on_the_cpu)
    assert says(sdpa, PASS, "bf16: sdpa (within 0.0")
    missing = "no attention kernel works for 'credit_varlen': varlen: ModuleNotFoundError: No module named 'flash_attn'"
    assert says(flash, WARN, missing)


def test_the_trial_has_the_heads_of_the_recipes_model(tmp_path):
    shape = {"hidden_size": 64, "num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 24}
    shape |= {"model_type": "qwen3", "num_hidden_layers": 1, "intermediate_size": 8, "vocab_size": 9}
    (tmp_path / "config.json").write_text(json.dumps(shape))
    for path, heads in ((str(tmp_path), (6, 3, 24)), ("Qwen/Qwen3-0.6B", (16, 8, 128))):
        assert device.heads_of(on_cuda(LAB, **{MODEL: path})) == heads
    assert device.heads_of(None) == device.HEADS
