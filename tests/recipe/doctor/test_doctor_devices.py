"""CUDA devices, their memory, and whether a recipe fits them; none of them is there."""

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


@pytest.mark.slow
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


@pytest.mark.slow
def test_a_unified_device_is_planned_as_one_whatever_the_recipe_was_made_for():
    spark = load_config("spark_qwen3_4b", GIVEN)
    (found,) = [
        p for p in plan_here(load_config("multihop_qwen3_4b", ALONE), GB10).phases if p.name == "rollout"
    ]
    assert found.capacity == GB10.total and "host: processes" in found.parts
    assert "host: processes" not in plan_here(spark, H100).phases[0].parts
