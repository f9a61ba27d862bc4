"""CUDA devices, their memory, assembler and attention kernels, and whether a recipe fits them; none of them is there."""

import json
from dataclasses import replace

import pytest
from omegaconf import OmegaConf

from kit.machine import FAIL, GB10, H100, LAPTOP, MACHINE, PASS, SKIP, WARN, cases, on_cuda, says
from kit.recipes import load_config
from verl_credit.errors import TooLargeError
from verl_credit.recipe import machine as facts_of
from verl_credit.recipe.doctor import checks, device, machine
from verl_credit.recipe.doctor.context import Context
from verl_credit.recipe.doctor.device import check_plan, plan_here
from verl_credit.recipe.machine import GIB, Memory, Ptxas, Torch

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


OLD = Ptxas("/triton/ptxas", (12, 8), bundled=True)
NEWER = replace(OLD, version=(12, 9))
TOOLKIT = Ptxas("/usr/local/cuda-13.0/bin/ptxas", (13, 0))
CHOSEN = "TRITON_PTXAS_PATH"


def assembling(capability, *found, chosen=None):
    environment = {CHOSEN: chosen} if chosen else {}
    return with_devices(replace(H100, capability=capability), ptxas=found, environment=environment)


test_ptxas = cases(
    device.check_ptxas,
    (assembling((9, 0), OLD), None, SKIP, "no Blackwell"),
    (assembling((10, 0), OLD), None, PASS, "/triton/ptxas, of CUDA 12.8: knows sm_100"),
    (assembling((12, 1), OLD), None, FAIL, "no newer one", "12.9 or newer for sm_121", "apt install cuda"),
    (assembling((12, 1), OLD, TOOLKIT), None, FAIL, f"export {CHOSEN}=/usr/local/cuda-13.0/bin/ptxas"),
    (assembling((12, 1), OLD, TOOLKIT, chosen=TOOLKIT.path), None, PASS, "/usr/local/cuda-13.0/bin/ptxas"),
    (assembling((12, 1), OLD, TOOLKIT, chosen="/gone"), None, FAIL, "no ptxas that runs"),
    (assembling((12, 1), NEWER), None, PASS),
    (assembling((12, 1)), None, FAIL, "no ptxas that runs"),
    (assembling((11, 0), NEWER), None, FAIL, "CUDA 13.0 or newer for sm_110"),
    (assembling((13, 7), NEWER), None, FAIL, "CUDA 13.0 or newer"),
)


def test_the_second_assembler_of_newer_tritons_has_its_own_variable():
    second = Ptxas("/triton/ptxas-blackwell", (12, 8), bundled=True, blackwell=True)
    first = replace(OLD, version=(13, 0))  # not the one that is called on Blackwell
    variable = "TRITON_PTXAS_BLACKWELL_PATH"
    facts = with_devices(GB10, ptxas=(first, second, TOOLKIT))
    assert says(device.check_ptxas(Context(facts)), FAIL, f"export {variable}={TOOLKIT.path}")
    chosen = replace(facts, environment={variable: TOOLKIT.path})
    assert says(device.check_ptxas(Context(chosen)), PASS)


def test_the_version_of_an_assembler_is_read(tmp_path):
    tool = tmp_path / "ptxas"
    tool.write_text("#!/bin/sh\necho 'Cuda compilation tools, release 12.9, V12.9.86'\n")
    tool.chmod(0o755)
    assert facts_of.ptxas_version(tool) == (12, 9)
    tool.write_text("#!/bin/sh\necho what\n")
    assert facts_of.ptxas_version(tool) is None and facts_of.ptxas_version(tmp_path / "absent") is None


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
    assert says(found, PASS, "100.0 GiB free of 121.0 GiB", "cudaMemGetInfo says 10.0 GiB")
    full = replace(facts, memory=replace(facts.memory, available=60 * GIB))
    assert says(machine.check_memory(Context(full, CUDA))[1], FAIL, "60.0 GiB free", "60.5 GiB")
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
SPARK = with_devices(GB10, memory=Memory(121 * GIB, 110 * GIB), cpus=20, packages={"vllm": "0.24.0"})
SHARE = device.SHARE_KEY


@pytest.fixture(scope="module")
def spark():
    return load_config("spark_qwen3_4b", GIVEN)


def test_a_unified_device_is_planned_as_one_whatever_the_recipe_was_made_for(spark):
    (found,) = [
        p for p in plan_here(load_config("multihop_qwen3_4b", ALONE), GB10).phases if p.name == "rollout"
    ]
    assert found.capacity == GB10.total and "host: processes" in found.parts
    assert "host: processes" not in plan_here(spark, H100).phases[0].parts


def compiling(config, jobs=None, share=None, **changes):
    config = config.copy()
    if share is not None:
        OmegaConf.update(config, SHARE, share)
    facts = replace(SPARK, environment={} if jobs is None else {"MAX_JOBS": jobs}, **changes)
    return device.check_compilation(Context(facts, config))


def test_compilers_have_to_fit_beside_what_is_planned(spark):
    """What the plan leaves of 121 GiB holds a few compilers of 8 GiB; ninja would start 22 on 20 cores."""
    planned = next(p for p in plan_here(spark, GB10).phases if p.name == "rollout").total
    fit = int((121 * GIB - planned) / (8 * GIB))
    assert 2 <= fit < 20
    unset = ["MAX_JOBS not set: 22 compilers on 20 cores", f"export MAX_JOBS={fit}"]
    assert says(compiling(spark), WARN, *unset)
    assert says(compiling(spark, "0"), WARN, "not set") and says(compiling(spark, "auto"), WARN, "not set")
    assert says(compiling(spark, str(fit + 1)), WARN, f"at most {fit} compilers", "flashinfer#3634")
    assert says(compiling(spark, str(fit)), PASS, f"{SHARE}=0.3 of 121.0 GiB")
    assert says(compiling(spark, cpus=fit - 2), PASS, f"{fit} compilers on {fit - 2} cores")


@pytest.mark.parametrize("share", [0.5, 0.8])
def test_a_share_at_which_a_machine_froze(spark, share):
    assert says(compiling(spark, "1", share), WARN, "a share below 0.5", "sglang#35860", f"{SHARE}=0.3")


def test_a_share_that_leaves_no_compiler_its_memory(spark):
    unknown = spark.copy()
    unknown.actor_rollout_ref.model.path = "some/where"  # cannot be planned: the free memory counts
    found = compiling(unknown, "1", memory=Memory(121 * GIB, 40 * GIB))
    free = "36.3 GiB of 40.0 GiB that are free"
    assert says(found, WARN, free, "at most 0 compilers", f"a smaller {SHARE}")


test_compilation_where_there_is_nothing_to_say = cases(
    device.check_compilation,
    (MACHINE, CUDA, SKIP, "no device shares"),
    (SPARK, LAB, SKIP, "no recipe"),
    (SPARK, None, SKIP, "no recipe"),
)
AGREES = (0, "some warning\nagrees: it (within 0.01 of the definition)\n")
NEVER = None  # the trial that must not be started
NO_KERNEL = (1, "Traceback\nRuntimeError: no kernel image is available\n")
NO_BACKEND = (1, "RuntimeError: no attention kernel works for 'credit_sdpa': sdpa: No available kernel")
INSTALLED = replace(MACHINE, packages={"flash-attn": "2.8.3"})
NO_DEVICE = replace(INSTALLED, torch=Torch("2.11.0", "13.0"))


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
def test_a_kernel_has_to_run_and_not_only_to_import(kernel, attention, facts, answer, status, texts):
    """With the heads of Qwen3-4B."""

    def trial(name, heads):
        assert (name, heads) == ({"flash": device.VARLEN}.get(kernel, f"credit_{kernel}"), (32, 8, 128))
        return answer

    config = on_cuda(LAB, **{MODEL: "Qwen/Qwen3-4B", device.ATTENTION: attention})
    check = getattr(device, f"check_{kernel}")
    assert says(check(Context(facts, config), trial), status, *texts)


@pytest.mark.slow
def test_the_trials_themselves_run():
    """The true ones, in processes of their own, of both kernels that `auto` may take; on the CPU, without flash-attn."""
    context = Context(INSTALLED, on_cuda(LAB, **{MODEL: "no such model"}))

    def on_the_cpu(name, heads):
        assert heads == device.HEADS
        return device.run_trial(name, (4, 2, 16), "cpu")

    assert says(device.check_sdpa(context, on_the_cpu), PASS, "bf16: sdpa (within 0.0")
    missing = "no attention kernel works for 'credit_varlen': varlen: ModuleNotFoundError: No module named 'flash_attn'"
    assert says(device.check_flash(context, on_the_cpu), WARN, missing)


def test_the_trial_has_the_heads_of_the_recipes_model(tmp_path):
    shape = {"hidden_size": 64, "num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 24}
    shape |= {"model_type": "qwen3", "num_hidden_layers": 1, "intermediate_size": 8, "vocab_size": 9}
    (tmp_path / "config.json").write_text(json.dumps(shape))
    for path, heads in ((str(tmp_path), (6, 3, 24)), ("Qwen/Qwen3-0.6B", (16, 8, 128))):
        assert device.heads_of(on_cuda(LAB, **{MODEL: path})) == heads
    assert device.heads_of(None) == device.HEADS
