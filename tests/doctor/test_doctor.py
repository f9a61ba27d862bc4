"""`verl-credit doctor`: every check on machines that are not there, and the command on this one."""

import json
import shutil
import socket
import sys
from collections import namedtuple
from dataclasses import replace
from importlib.metadata import entry_points
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
import torch
import verl
from omegaconf import OmegaConf
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from kit.machine import FAIL, GB10, H100, LAPTOP, MACHINE, PASS, SKIP, WARN, says
from kit.preflight import GOOD
from kit.recipes import load_config
from verl_credit.cli import main
from verl_credit.doctor import command, ray_checks
from verl_credit.doctor.hardware import device, disk, first_start, kernels, machine, orphans, software
from verl_credit.doctor.hardware.room import check_room, plan_here
from verl_credit.doctor.hardware.vllm_version import VllmError, judge_vllm, pinned
from verl_credit.doctor.inputs import recipe
from verl_credit.doctor.result import failed, passed
from verl_credit.errors import PreflightError
from verl_credit.host.process import doctor_probes
from verl_credit.machine import gather
from verl_credit.machine.facts import GIB, Memory, Process, Ptxas, Torch, size
from verl_credit.machine.ray_address import cluster_address


@pytest.fixture(scope="module")
def lab():
    return load_config("lab", [])


@pytest.fixture
def cuda(lab):
    """The lab's recipe as it would ask a GPU for vLLM; every test has its own."""
    config = lab.copy()
    for key, value in {
        "trainer.device": "cuda",
        "actor_rollout_ref.rollout.name": "vllm",
        "actor_rollout_ref.rollout.gpu_memory_utilization": 0.5,
        "ray_kwargs.ray_init.num_cpus": None,
        "ray_kwargs.ray_init.num_gpus": None,
        "ray_kwargs.ray_init.object_store_memory": None,
    }.items():
        OmegaConf.update(config, key, value)
    return config


# --- software ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "version, status",
    [((3, 10, 14), FAIL), ((3, 11, 0), PASS), ((3, 12, 9), PASS), ((3, 13, 0), FAIL)],
)
def test_python(version, status):
    assert says(software.check_python(replace(MACHINE, python=version), None), status)


def test_torch(cuda, lab):
    check = software.check_torch
    assert says(check(MACHINE, cuda), PASS, "CUDA 13.0")
    assert says(check(LAPTOP, lab), PASS, "CPUs only")
    assert says(check(LAPTOP, None), PASS)
    assert says(
        check(LAPTOP, cuda), FAIL, "CPUs only, and trainer.device=cuda", "pip install --force-reinstall"
    )
    assert says(check(replace(MACHINE, torch=Torch(None, error="no libcudart")), None), FAIL, "no libcudart")


@pytest.mark.parametrize(
    "policy, status",
    [
        (None, PASS), ("auto", PASS), (" AUTO ", PASS), ("verl_credit", PASS), ("other, Verl_Credit", PASS),
        ("none", FAIL), (" None", FAIL), ("", FAIL), ("other", FAIL), ("verl_credit2,auto", FAIL),
    ],
)  # fmt: skip
def test_a_list_of_plugins_without_ours(lab, policy, status):
    facts = replace(LAPTOP, environment={} if policy is None else {software.PLUGINS: policy})
    texts = [f"VERL_USE_EXTERNAL_PLUGINS={policy}", "verl_credit"] if status is FAIL else []
    assert says(software.check_environment(facts, lab), status, *texts)
    assert says(software.check_environment(facts, None), status, *texts)


POLICIES = ("auto", " AUTO ", "verl_credit", "x, Verl_Credit", "none", " None", "", "x", "verl_credit2,auto")


@pytest.mark.parametrize("policy", POLICIES)
def test_what_verl_makes_of_the_list_of_plugins(policy):
    """The rule is verl's: the lines of its own source, on an entry point with our name."""
    assert entry_points(group="verl.plugins")[software.OURS].value == "verl_credit.host.external"
    source = Path(verl.__file__).read_text()
    begin, end = source.index("_plugins_policy = os"), source.index('if os.getenv("VERL_USE_MODELSCOPE"')
    lines = source[begin:end].replace("from importlib.metadata import entry_points as _entry_points", "")
    loaded = []
    point = SimpleNamespace(name=software.OURS, load=lambda: loaded.append(software.OURS))
    exec(lines, {"os": SimpleNamespace(getenv=lambda *_: policy), "_entry_points": lambda group: [point]})
    assert bool(loaded) is software.loads_ours(policy)


def test_a_platform_that_is_not_the_recipes(cuda, lab):
    def check(platform, config):
        return software.check_environment(replace(MACHINE, environment={software.PLATFORM: platform}), config)

    assert says(
        check("nvidia", lab), FAIL, "VERL_PLATFORM=nvidia, and trainer.device=cpu", "unset VERL_PLATFORM"
    )
    assert says(check("cpu", cuda), FAIL, "VERL_PLATFORM=cpu, and trainer.device=cuda")
    assert (
        says(check("cpu", lab), PASS) and says(check("nvidia", cuda), PASS) and says(check("cpu", None), PASS)
    )


LINES = ["transformers<5.11,>=5.5.3,!=5.6.0", "tensordict<=0.10.0", "vllm==0.24.0; extra == 'vllm'"]


@pytest.mark.parametrize(
    "installed, status, texts",
    [
        ({"transformers": "5.10.4", "tensordict": "0.10.0"}, PASS, ["2 packages"]),
        (
            {"transformers": "5.11.0", "tensordict": "0.10.0"},
            FAIL,
            ["transformers 5.11.0", "pip install 'transformers"],
        ),
        ({"transformers": "5.6.0", "tensordict": "0.10.0"}, FAIL, ["transformers 5.6.0"]),
        ({"transformers": "5.9.0"}, FAIL, ["tensordict is missing"]),
        ({"transformers": "5.9.0", "tensordict": "0.11.0rc1"}, FAIL, ["tensordict 0.11.0rc1"]),
    ],
)
def test_ranges_of_metadata(installed, status, texts):
    assert says(software.judge_requirements("verl's requirements", LINES, "", installed), status, *texts)


def test_our_own_ranges_warn_and_what_is_missing_fails():
    def ours(installed):
        return software.judge_requirements(
            "ours", ["a<2; extra == 'verl'", "b"], "verl", installed, software.warned
        )

    assert says(ours({"a": "2.0", "b": "1"}), WARN, "a 2.0", "pip install 'a<2'")
    assert says(ours({"a": "2.0"}), FAIL, "b is missing")
    assert says(software.judge_requirements("x", None, "", {}), FAIL, "not installed")


def test_these_are_the_requirements_that_verl_really_has():
    lines = software._requires("verl")
    assert (
        any(line.startswith("transformers") for line in lines) and software._requires("no-such-thing") is None
    )
    assert pinned(lines) == "==0.24.0"


@pytest.mark.parametrize(
    "version, engine, status, texts",
    [
        ("0.24.0", "vllm", PASS, ["the one verl pins"]),
        ("0.24.0+cu130", "vllm", PASS, ["the one verl pins"]),
        ("0.21.0", "vllm", WARN, ["vllm 0.21.0", "vllm==0.24.0"]),
        ("0.17.1", "vllm", FAIL, ["older than 0.18.0", "pip install 'vllm==0.24.0'"]),
        ("0.17.1", "hf", WARN, ["older than 0.18.0"]),
        (None, "vllm", FAIL, ["not installed"]),
        (None, "hf", SKIP, ["rolls out with hf"]),
        ("mine", "vllm", FAIL, ["no version number"]),
        ("0.27.1+cpu", "vllm", FAIL, ["a CPU build, and trainer.device=cuda"]),
    ],
)
def test_vllm(cuda, version, engine, status, texts):
    cuda.actor_rollout_ref.rollout.name = engine
    facts = replace(MACHINE, packages={"vllm": version} if version else {})
    assert says(software.check_vllm(facts, cuda), status, *texts)


def test_the_cpu_lane_of_vllm_is_excepted_by_name(cuda):
    cuda.trainer.device = "cpu"
    facts = replace(MACHINE, packages={"vllm": "0.27.1+cpu"})
    assert says(software.check_vllm(facts, cuda), PASS, "a CPU build; not compared")
    assert judge_vllm("0.27.1+cpu", "==0.24.0", device="cpu")
    with pytest.raises(VllmError, match="CPU build"):
        judge_vllm("0.27.1+cpu", "==0.24.0", device="cuda")


# --- devices -------------------------------------------------------------------------------------------------------


def test_cuda(cuda, lab):
    check = device.check_cuda
    assert says(check(MACHINE, cuda), PASS, "NVIDIA H100 (sm_90, 80.0 GiB)", "driver for CUDA 13.0")
    assert says(check(LAPTOP, lab), SKIP, "no CUDA device")
    broken = replace(LAPTOP, torch=Torch("2.11.0", "13.0", error="RuntimeError: driver too old"))
    assert says(check(broken, cuda), FAIL, "no CUDA device is visible", "driver too old", "hardware=laptop")
    assert says(check(replace(MACHINE, driver="12.8"), cuda), FAIL, "a driver for CUDA 13.0")
    assert says(check(replace(MACHINE, driver="13.1"), cuda), PASS)
    cuda.trainer.n_gpus_per_node = 8
    assert says(check(MACHINE, cuda), FAIL, "trainer.n_gpus_per_node=8", "trainer.n_gpus_per_node=1")


def test_a_head_without_a_gpu_may_lead_a_cluster(cuda):
    leader = replace(LAPTOP, environment={"RAY_ADDRESS": "10.0.0.1:6379"})
    assert says(device.check_cuda(leader, cuda), SKIP, "the Ray cluster's nodes")


AGREES = (0, "some warning\nagrees: it (within 0.01 of the definition)\n")
NEVER = None  # the trial that must not be started


def tried(check, facts, config, wanted, answer):
    """``check`` with a trial that gives ``answer``; it must be of the kernel ``wanted``, with the heads of Qwen3-4B."""

    def trial(name, heads):
        assert (name, heads) == (wanted, (32, 8, 128))
        return answer

    OmegaConf.update(config, "actor_rollout_ref.model.path", "Qwen/Qwen3-4B")
    return check(facts, config, trial)


def test_flash_attention_has_to_run_and_not_only_to_import(cuda):
    there = replace(MACHINE, packages={"flash-attn": "2.8.3"})

    def check(facts, answer):
        return tried(kernels.check_flash, facts, cuda, "credit_varlen", answer)

    assert says(check(there, AGREES), PASS, "flash-attn 2.8.3 runs on 32 heads of queries", "within 0.01")
    error = (1, "Traceback\nRuntimeError: no kernel image is available\n")
    assert says(
        check(there, error), WARN, "does not run: RuntimeError: no kernel image", "attn_implementation=auto"
    )
    assert says(check(there, (0, "agrees: x\nand more")), WARN, "does not run")
    assert says(check(there, (-11, "")), WARN, "no output")
    no_device = replace(there, torch=Torch("2.11.0", "13.0"))
    assert says(check(no_device, NEVER), SKIP, "no CUDA device to run it on")
    assert says(check(MACHINE, NEVER), SKIP, "not installed")
    for attention in ("credit_varlen", "flash_attention_2"):
        OmegaConf.update(cuda, kernels.ATTENTION, attention)
        assert says(check(there, error), FAIL)
        assert says(check(MACHINE, NEVER), FAIL, "not installed, and")


def test_sdpa_has_to_run_where_it_is_taken(cuda):
    def check(facts, answer):
        return tried(kernels.check_sdpa, facts, cuda, "credit_sdpa", answer)

    no_backend = (1, "RuntimeError: no attention kernel works for 'credit_sdpa': sdpa: No available kernel")
    assert says(check(MACHINE, AGREES), PASS, "SDPA runs on 32 heads of queries, 8 of keys, 128 wide")
    assert says(check(MACHINE, no_backend), FAIL, "No available kernel", "fused backends")
    assert says(check(replace(MACHINE, packages={"flash-attn": "2.8.3"}), no_backend), WARN)
    assert says(check(LAPTOP, NEVER), SKIP)
    OmegaConf.update(cuda, kernels.ATTENTION, "credit_flex")
    assert says(check(MACHINE, NEVER), SKIP, "attn_implementation=credit_flex")


def test_flex_attention_has_to_compile_in_time_where_it_is_asked_for(cuda):
    def check(facts, answer):
        return tried(kernels.check_flex, facts, cuda, "credit_flex", answer)

    assert says(check(MACHINE, NEVER), SKIP, "auto takes flash-attn or SDPA before it")
    OmegaConf.update(cuda, kernels.ATTENTION, "credit_flex")
    assert says(check(MACHINE, AGREES), PASS)
    assert says(check(MACHINE, (None, "compiling\n")), FAIL, "not done after 240 s (compiling)")
    assert says(check(MACHINE, (1, "PTXASError: sm_121a")), FAIL, "PTXASError: sm_121a", "ptxas")
    assert says(check(LAPTOP, NEVER), SKIP)


def test_the_trials_themselves_run(cuda):
    """The true ones, in processes of their own, of both kernels that `auto` may take; on the CPU, without flash-attn."""
    OmegaConf.update(cuda, "actor_rollout_ref.model.path", "no such model")
    facts = replace(MACHINE, packages={"flash-attn": "2.8.3"})

    def on_the_cpu(name, heads):
        assert heads == kernels.HEADS
        return kernels.run_trial(name, (4, 2, 16), "cpu")

    assert says(kernels.check_sdpa(facts, cuda, on_the_cpu), PASS, "bf16: sdpa (within 0.0")
    missing = "no attention kernel works for 'credit_varlen': varlen: ModuleNotFoundError: No module named 'flash_attn'"
    assert says(kernels.check_flash(facts, cuda, on_the_cpu), WARN, missing)


def test_the_trial_has_the_heads_of_the_recipes_model(cuda, tmp_path):
    shape = {"hidden_size": 64, "num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 24}
    shape |= {"model_type": "qwen3", "num_hidden_layers": 1, "intermediate_size": 8, "vocab_size": 9}
    (tmp_path / "config.json").write_text(json.dumps(shape))
    OmegaConf.update(cuda, "actor_rollout_ref.model.path", str(tmp_path))
    assert kernels.heads_of(cuda) == (6, 3, 24)
    OmegaConf.update(cuda, "actor_rollout_ref.model.path", "Qwen/Qwen3-0.6B")
    assert kernels.heads_of(cuda) == (16, 8, 128)
    assert kernels.heads_of(None) == kernels.HEADS


OLD = Ptxas("/triton/ptxas", (12, 8), bundled=True)
TOOLKIT = Ptxas("/usr/local/cuda-13.0/bin/ptxas", (13, 0))


@pytest.mark.parametrize(
    "capability, found, environment, status, texts",
    [
        ((9, 0), (OLD,), {}, SKIP, ["no Blackwell"]),
        ((10, 0), (OLD,), {}, PASS, ["/triton/ptxas, of CUDA 12.8: knows sm_100"]),
        (
            (12, 1),
            (OLD,),
            {},
            FAIL,
            ["no newer one", "CUDA 12.9 or newer for sm_121", "apt install cuda-nvcc"],
        ),
        ((12, 1), (OLD, TOOLKIT), {}, FAIL, ["export TRITON_PTXAS_PATH=/usr/local/cuda-13.0/bin/ptxas"]),
        (
            (12, 1),
            (OLD, TOOLKIT),
            {"TRITON_PTXAS_PATH": TOOLKIT.path},
            PASS,
            ["/usr/local/cuda-13.0/bin/ptxas"],
        ),
        ((12, 1), (OLD, TOOLKIT), {"TRITON_PTXAS_PATH": "/gone"}, FAIL, ["no ptxas that runs"]),
        ((12, 1), (replace(OLD, version=(12, 9)),), {}, PASS, []),
        ((12, 1), (), {}, FAIL, ["no ptxas that runs"]),
        ((11, 0), (replace(OLD, version=(12, 9)),), {}, FAIL, ["CUDA 13.0 or newer for sm_110"]),
        ((13, 7), (replace(OLD, version=(12, 9)),), {}, FAIL, ["CUDA 13.0 or newer"]),
    ],
)
def test_ptxas(capability, found, environment, status, texts):
    blackwell = replace(H100, capability=capability)
    facts = replace(
        MACHINE, torch=Torch("2.11.0", "13.0", (blackwell,)), ptxas=found, environment=environment
    )
    assert says(device.check_ptxas(facts, None), status, *texts)


def test_the_second_assembler_of_newer_tritons_has_its_own_variable():
    second = Ptxas("/triton/ptxas-blackwell", (12, 8), bundled=True, blackwell=True)
    first = replace(OLD, version=(13, 0))  # not the one that is called on Blackwell
    facts = replace(MACHINE, torch=Torch("2.11.0", "13.0", (GB10,)), ptxas=(first, second, TOOLKIT))
    assert says(device.check_ptxas(facts, None), FAIL, f"export TRITON_PTXAS_BLACKWELL_PATH={TOOLKIT.path}")
    set_ = replace(facts, environment={"TRITON_PTXAS_BLACKWELL_PATH": TOOLKIT.path})
    assert says(device.check_ptxas(set_, None), PASS)


def test_the_version_of_an_assembler_is_read(tmp_path):
    tool = tmp_path / "ptxas"
    tool.write_text("#!/bin/sh\necho 'Cuda compilation tools, release 12.9, V12.9.86'\n")
    tool.chmod(0o755)
    assert gather.ptxas_version(tool) == (12, 9)
    tool.write_text("#!/bin/sh\necho what\n")
    assert gather.ptxas_version(tool) is None and gather.ptxas_version(tmp_path / "absent") is None


# --- memory, disk, ports -------------------------------------------------------------------------------------------


def test_memory_of_the_host():
    def check(**changes):
        facts = replace(LAPTOP, memory=replace(LAPTOP.memory, **changes))
        return machine.check_memory(facts, None)[0]

    assert says(check(), PASS, "100.0 GiB available of 128.0 GiB")
    assert says(check(available=3 * GIB), WARN, "4.0 GiB for the smallest recipe")
    assert says(
        check(limit=16 * GIB, limit_used=13 * GIB), WARN, "13.0 GiB of 16.0 GiB used", "docker run --memory"
    )
    assert says(check(limit=16 * GIB, limit_used=GIB), PASS)


def test_memory_of_a_device(cuda):
    def check(free, config=cuda):
        facts = replace(MACHINE, torch=Torch("2.11.0", "13.0", (replace(H100, free=free),)))
        return machine.check_memory(facts, config)[1]

    assert says(check(79 * GIB), PASS)
    assert says(check(41 * GIB), WARN, "an idle device")
    assert says(check(39 * GIB), FAIL, "gpu_memory_utilization=0.5", "40.0 GiB")
    assert says(check(39 * GIB, None), WARN)


def test_unified_memory_is_what_the_cpu_side_has(cuda):
    """cudaMemGetInfo says 10 GiB, because files in the cache count as used; MemAvailable says 100."""
    facts = replace(MACHINE, torch=Torch("2.11.0", "13.0", (GB10,)))
    assert says(
        machine.check_memory(facts, cuda)[1],
        PASS,
        "100.0 GiB free of 121.0 GiB",
        "cudaMemGetInfo says 10.0 GiB",
    )
    full = replace(facts, memory=replace(facts.memory, available=60 * GIB))
    assert says(machine.check_memory(full, cuda)[1], FAIL, "60.0 GiB free", "60.5 GiB")
    limited = replace(facts, memory=replace(facts.memory, limit=32 * GIB, limit_used=2 * GIB))
    assert machine.device_free(GB10, limited) == 30 * GIB


@pytest.mark.parametrize(
    "changes, unified",
    [({}, False), ({"integrated": True}, True), ({"name": "NVIDIA GB10"}, True), ({"capability": (12, 1)}, True),
     ({"capability": (12, 0)}, False)],
)  # fmt: skip
def test_which_memory_is_unified(changes, unified):
    assert replace(H100, **changes).unified is unified


def tree(root, **files):
    for name, text in files.items():
        path = root / name.replace("__", "/").replace("DOT", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def test_the_tightest_limit_of_the_control_groups_counts(tmp_path):
    proc, groups = tmp_path / "proc", tmp_path / "cgroup"
    tree(proc, self__cgroup="0::/a/b\n")
    tree(groups, a__b__memoryDOTmax="max\n", a__memoryDOTmax="1000\n", a__memoryDOTcurrent="700\n")
    tree(
        groups, a__memoryDOTstat="anon 5\ninactive_file 300\n", memoryDOTmax="9000\n", memoryDOTcurrent="10\n"
    )
    assert gather.control_group(proc, groups) == (1000, 400)
    tree(proc, self__cgroup="9:memory:/x\n3:cpu:/\n")  # version 1, the path of the host not to be seen
    tree(groups, memory__memoryDOTlimit_in_bytes="500", memory__memoryDOTusage_in_bytes="120")
    tree(groups, memory__memoryDOTstat="total_inactive_file 20\n")
    assert gather.control_group(proc, groups) == (500, 100)
    assert gather.control_group(tmp_path / "none", groups) == (None, 0)
    assert gather.control_group(proc, tmp_path / "none") == (None, 0)


def test_shared_memory(cuda):
    def check(free, asked=None):
        OmegaConf.update(cuda, "ray_kwargs.ray_init.object_store_memory", asked)
        return machine.check_shm(replace(MACHINE, memory=replace(MACHINE.memory, shm_free=free)), cuda)

    assert says(check(64 * 2**20), WARN, "64 MiB free", "38.4 GiB", "--shm-size")  # 30 % of 128 GiB
    assert says(check(64 * 2**20, asked=32 * 2**20), PASS)
    assert says(check(39 * GIB), PASS)


def test_disk(cuda, tmp_path):
    Usage = namedtuple("Usage", "free")
    cuda.run_dir = str(tmp_path / "elsewhere")
    cuda.trainer.default_local_dir, cuda.trainer.save_freq, cuda.trainer.max_actor_ckpt_to_keep = (
        str(tmp_path / "a" / "b"),
        5,
        2,
    )

    (tmp_path / "a").mkdir()

    def check(free, parameters=GIB, **changes):
        def usage(path):
            assert path == tmp_path / "a"  # where checkpoints go, not run_dir
            return Usage(free)

        config = cuda.copy()
        for key, value in changes.items():
            OmegaConf.update(config, key.replace("__", "."), value)
        return disk.check_disk(MACHINE, config, parameters, usage)

    assert says(check(11 * GIB), FAIL, "12.0 GiB a checkpoint", str(tmp_path))
    assert says(check(35 * GIB), WARN, "36.0 GiB with 2 kept")
    every = {"trainer__max_actor_ckpt_to_keep": None, "trainer__total_training_steps": 50}
    assert says(check(131 * GIB, **every), WARN, "132.0 GiB with 10 kept")
    assert says(check(36 * GIB), PASS)
    assert says(check(5 * GIB, actor_rollout_ref__model__lora_rank=32), WARN, "4.0 GiB a checkpoint")
    assert says(check(GIB // 2, trainer__save_freq=-1), PASS, "no checkpoints")
    assert says(check(GIB // 2, None), WARN) and says(check(2 * GIB, None), PASS)


def test_ports(lab):
    config = lab.copy()
    metrics = "transfer_queue.metrics"
    OmegaConf.update(config, "actor_rollout_ref.rollout.prometheus.enable", True)  # its 9090 has to be in use
    OmegaConf.update(config, f"{metrics}.port", 9191)
    assert dict(machine.named_ports(config)) == {}  # switched off
    OmegaConf.update(config, f"{metrics}.enabled", True)
    assert dict(machine.named_ports(config)) == {f"{metrics}.port": 9191}
    held = machine.check_ports(MACHINE, config, lambda port: "process 7 (python)")
    assert says(held, FAIL, f"{metrics}.port=9191 is in use by process 7", f"{metrics}.port=ANOTHER")
    assert says(machine.check_ports(MACHINE, config, lambda port: None), PASS)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert machine.port_holder(port)
    assert machine.port_holder(port) is None


# --- processes -----------------------------------------------------------------------------------------------------

INIT = Process(1, 0, "systemd", ("/sbin/init",))
PYTHON = "/venv/bin/python3.11"
RETRIEVER = (PYTHON, "-m", "verl_credit_retriever.cli", "serve")


def test_processes_of_a_live_run_are_no_orphans():
    live = (
        INIT,
        Process(50, 1, "bash", ("-bash",), started=1.0),
        Process(60, 50, "python3.11", (PYTHON, "-W", "ignore", "-m", "verl_credit.cli", "train"), started=2.0),
        Process(61, 60, "raylet", ("/venv/ray/core/src/ray/raylet/raylet", "--x"), started=3.0),
        Process(62, 61, "ray::WorkerDict", ("ray::WorkerDict.train",), started=4.0),
        Process(63, 62, "VLLM::EngineCore", ("VLLM::EngineCore",), started=5.0),
        Process(64, 60, "python3.11", (*RETRIEVER, "--parent-pid", "60"), started=3.0),
        Process(70, 50, "vllm", (PYTHON, "/venv/bin/vllm", "serve", "m"), started=3.0),
    )  # fmt: skip
    assert orphans.orphans(live) == []


def test_orphans_are_named_with_what_they_hold():
    dead = (
        INIT,
        Process(61, 1, "raylet", ("/venv/ray/core/src/ray/raylet/raylet",), "ann", 2_800.0, 2 * GIB),
        Process(62, 61, "ray::WorkerDict", ("ray::WorkerDict.train", "", ""), "ann", 2_801.0, GIB),
        Process(63, 1, "VLLM::EngineCor", ("VLLM::EngineCore",), "bob", 2_802.0, 40 * GIB),
        Process(64, 1, "python3.11", (*RETRIEVER, "--parent-pid", "60"), started=2_803.0),
        Process(65, 1, "python3.11", (PYTHON, "/home/ann/notes.py", "ray::"), started=1.0),
        Process(66, 1, "python3.11", (PYTHON, "-m", "verl_credit_retriever", "serve"), started=1.0),
    )  # fmt: skip
    assert [p.pid for p in orphans.orphans(dead)] == [61, 62, 63, 64]  # 66 was started by hand
    result = orphans.check_processes(replace(MACHINE, processes=dead), None)
    assert says(result, WARN, "63 VLLM::EngineCore (user bob, 2 h old, 40.0 GiB)", "kill 61 62 63 64")
    assert says(orphans.check_processes(MACHINE, None), PASS)


def test_a_reused_process_number_is_no_parent():
    late = Process(60, 1, "bash", ("-bash",), started=9.0)
    worker = Process(62, 60, "ray::IDLE", ("ray::IDLE",), started=5.0)
    server = Process(64, 1, "python3", (*RETRIEVER, "--parent-pid", "60"), started=5.0)  # fmt: skip
    assert [p.pid for p in orphans.orphans((INIT, late, worker, server))] == [62, 64]


def test_a_cluster_that_ray_start_brought_up_has_its_right_to_be():
    head = (
        INIT,
        Process(70, 1, "gcs_server", ("/r/gcs_server", "--gcs_server_port=6379"), started=1.0),
        Process(71, 1, "raylet", ("/r/raylet", "--gcs-address=10.0.0.1:6379"), started=1.0),
        Process(72, 71, "ray::IDLE", ("ray::IDLE",), started=2.0),
        Process(81, 1, "raylet", ("/r/raylet", "--gcs-address=10.0.0.1:6380"), started=1.0),
    )
    assert [p.pid for p in orphans.orphans(head, "10.0.0.1:6379")] == [81]
    assert len(orphans.orphans(head)) == 4


@pytest.mark.parametrize("first, lost", [("python3.11", []), ("sleep", [9]), ("bash", [9]), ("tini", [9])])
def test_process_1_of_a_container(first, lost):
    found = (Process(1, 0, first, (first,)), Process(9, 1, "ray::IDLE", ("ray::IDLE",), started=5.0))
    assert [p.pid for p in orphans.orphans(found)] == lost


def test_where_the_cluster_is(tmp_path):
    noted = tmp_path / "ray_current_cluster"
    noted.write_text("10.0.0.2:6379\n")
    assert cluster_address({"RAY_ADDRESS": "10.0.0.1:6379"}, str(noted)) == "10.0.0.1:6379"
    assert cluster_address({"RAY_ADDRESS": "local"}, str(noted)) == ""
    assert cluster_address({}, str(noted)) == "10.0.0.2:6379"
    assert cluster_address({}, str(tmp_path / "absent")) == ""


# --- the recipe's inputs -------------------------------------------------------------------------------------------


@pytest.fixture
def model(tmp_path):
    """A folder in Hugging Face format: two shards of 6 and 4 parameters."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "qwen3", "vocab_size": 2}')
    save_file({"a": torch.zeros(2, 3)}, folder / "1.safetensors")
    save_file({"b": torch.zeros(4)}, folder / "2.safetensors", metadata={"format": "pt"})
    index = {"weight_map": {"a": "1.safetensors", "b": "2.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    Tokenizer(WordLevel({"x": 0, "y": 1}, unk_token="x")).save(str(folder / "tokenizer.json"))
    return folder


def cut(path):
    path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.parametrize(
    "harm, text",
    [
        (lambda f: (f / "config.json").write_text("{"), "config.json is not JSON"),
        (lambda f: (f / "config.json").unlink(), "no config.json there"),
        (lambda f: (f / "2.safetensors").unlink(), "2.safetensors: No such file"),
        (lambda f: cut(f / "2.safetensors"), "and its header describes"),
        (lambda f: (f / "1.safetensors").write_text("<html>not found</html>"), "its header would have"),
        (lambda f: (f / "1.safetensors").write_bytes(b"\x04\0\0\0\0\0\0\0[[]]"), "not a safetensors file"),
        (lambda f: (f / "tokenizer.json").unlink(), "no tokenizer"),
        (lambda f: (f / "tokenizer.json").write_text("{}"), "not a tokenizer"),
        (
            lambda f: (f / "config.json").write_text('{"vocab_size": 1}'),
            "2 tokens, and config.json has vocab_size=1",
        ),
        (lambda f: [p.unlink() for p in f.glob("*.safetensors*")], "no *.safetensors"),
    ],
)
def test_a_model_that_cannot_be_read(lab, model, harm, text):
    config = lab.copy()
    config.actor_rollout_ref.model.path = str(model)
    assert says(recipe.check_model_files(MACHINE, config), PASS, "qwen3, 10 parameters")
    assert recipe.parameters_of(config) == 10
    harm(model)
    assert says(recipe.check_model_files(MACHINE, config), FAIL, text)


def test_a_model_on_the_hub(lab, model, hub):
    config = lab.copy()
    config.actor_rollout_ref.model.path = "Qwen/Qwen3-4B-Instruct-9999"
    assert says(recipe.check_model_files(MACHINE, config), FAIL, "HF_HUB_OFFLINE", "hf download")
    folder = hub("Qwen/Qwen3-4B-Instruct-9999", model)
    assert says(recipe.check_model_files(MACHINE, config), PASS, "in the hub's cache")
    assert recipe.parameters_of(config) == recipe.count_parameters(model)
    (folder / "tokenizer.json").unlink()
    assert says(recipe.check_model_files(MACHINE, config), WARN, "no tokenizer", "hf download")


def test_the_size_of_a_model_that_is_not_here_is_known_by_its_name(lab, hub):
    config = lab.copy()
    for path, parameters in (("Qwen/Qwen3-4B", 4_022_468_096), ("someone/something", None)):
        config.actor_rollout_ref.model.path = path
        assert recipe.parameters_of(config) == parameters


def test_a_recipe_by_name_needs_room_for_its_checkpoints(tmp_path, hub):
    """With the model's size unknown a GiB was enough for any."""
    Usage = namedtuple("Usage", "free")
    given = ["data.train_files=x", "data.val_files=x", "search.url=http://x", f"run_dir={tmp_path}"]
    config = load_config("multihop_qwen3_4b", given)
    found = disk.check_disk(MACHINE, config, recipe.parameters_of(config), lambda path: Usage(40 * GIB))
    assert says(found, FAIL, "45.0 GiB a checkpoint")


def test_a_lab_that_is_not_built_is_no_fault(lab, tmp_path):
    config = lab.copy()
    config.lab.dir = str(tmp_path / "lab")
    assert says(recipe.check_model_files(MACHINE, config), SKIP, "not built yet")
    assert all(says(r, SKIP, "not built yet") for r in recipe.check_data_files(MACHINE, config))
    assert says(recipe.check_retriever(MACHINE, config), SKIP, "the lab starts its own")


def test_data(lab, tmp_path):
    config = lab.copy()
    path = str(tmp_path / "train.parquet")
    parquet.write_table(pa.Table.from_pylist([GOOD] * 16), path)
    config.data.train_files, config.data.val_files = path, [path, str(tmp_path / "absent.parquet")]
    train, held_out = recipe.check_data_files(MACHINE, config)
    assert says(train, PASS, "16 rows in 1 files") and says(held_out, FAIL, "absent.parquet does not exist")
    config.data.train_batch_size = 17
    assert says(recipe.check_data_files(MACHINE, config)[0], FAIL, "holds 16 rows; at least 17")


def test_the_retriever_and_its_index(lab, monkeypatch):
    config = lab.copy()
    config.search.url = ["http://a", "http://b"]
    said = "http://a 0123; http://b 0123"
    monkeypatch.setattr(recipe, "check_server", lambda settings: ("0123", said))
    assert says(recipe.check_retriever(MACHINE, config), PASS, f"index: {said}")

    def refuse(settings):
        raise PreflightError("search.url=http://b: the retriever is not ready")

    monkeypatch.setattr(recipe, "check_server", refuse)
    assert says(recipe.check_retriever(MACHINE, config), FAIL, "not ready", "verl-credit-retriever serve")
    config.search.max_searches = 0
    assert says(recipe.check_retriever(MACHINE, config), SKIP, "does not search")


# --- Ray -----------------------------------------------------------------------------------------------------------

NAMES = {"estimator info_gain": True, "loss turn_ppo": True}
CLUSTER = replace(MACHINE, environment={"RAY_ADDRESS": "10.0.0.1:6379"})


def node(**changes):
    return {"id": "a", "host": "spark-1", "cpus": 20.0, "gpus": 1.0, "plugin": NAMES, **changes}


def asked(*nodes, code=0):
    return lambda *question: (code, "a log line\n" + json.dumps({"nodes": list(nodes)}) + "\n")


def here(*question):
    assert question == ("plugin",)
    return 0, json.dumps(NAMES)


@pytest.fixture
def no_cluster(monkeypatch):
    monkeypatch.setattr(
        "verl_credit.machine.ray_address.cluster_address",
        lambda environment: environment.get("RAY_ADDRESS", ""),
    )


def test_a_local_ray_has_to_have_what_the_recipe_wants(cuda, lab, no_cluster):
    def check(facts, config):
        return ray_checks.check_ray(facts, config, here)[0]

    assert says(check(MACHINE, cuda), PASS, "starts one here with 16 CPUs and 1 GPUs")
    assert says(check(LAPTOP, lab), PASS, "16 CPUs and 1 GPUs")  # logical ones
    assert says(check(LAPTOP, None), PASS, "16 CPUs and 0 GPUs")
    assert says(check(replace(MACHINE, cpus=3), cuda), FAIL, "4 CPUs", "ray_kwargs.ray_init.num_cpus=4")
    assert says(check(LAPTOP, cuda), FAIL, "1 GPUs (trainer.n_gpus_per_node)")
    lonely = lab.copy()
    lonely.ray_kwargs.ray_init.num_gpus = 0
    assert says(check(LAPTOP, lonely), FAIL, "ray_kwargs.ray_init.num_gpus=1")
    cuda.trainer.nnodes = 2
    assert says(check(MACHINE, cuda), FAIL, "trainer.nnodes=2", "ray start --head here")
    assert says(check(replace(MACHINE, packages={}), cuda), FAIL, "ray is not installed")


def test_a_cluster_that_the_recipe_names_is_the_one_that_is_asked(cuda, no_cluster):
    OmegaConf.update(cuda, "ray_kwargs.ray_init.address", "10.0.0.9:6379", force_add=True)
    found = ray_checks.check_ray(MACHINE, cuda, here, lambda address: f"refused at {address}")[0]
    assert says(found, FAIL, "ray_kwargs.ray_init.address says 10.0.0.9:6379", "refused at 10.0.0.9:6379")


def test_the_plugin_in_a_fresh_process(no_cluster):
    def plugin(code, said):
        return ray_checks.check_ray(MACHINE, None, lambda *_: (code, said))[1]

    assert says(plugin(0, json.dumps(NAMES)), PASS, "2 names registered")
    assert says(plugin(0, json.dumps({**NAMES, "loss turn_ppo": False})), FAIL, "lacks loss turn_ppo")
    assert says(plugin(1, "ModuleNotFoundError: no verl"), FAIL, "no verl")
    assert says(plugin(None, ""), FAIL, "no answer in 180 s") and says(plugin(-9, ""), FAIL, "exit code -9")


def test_a_cluster_has_to_have_what_the_recipe_wants(cuda, no_cluster):
    def check(*nodes):
        return ray_checks.check_ray(CLUSTER, cuda, asked(*nodes), lambda address: "")

    cuda.trainer.nnodes = 2
    resources, plugin = check(node(), node(host="spark-2"))
    assert says(resources, PASS, "spark-2 (20 CPUs, 1 GPUs)") and says(plugin, PASS, "spark-1, spark-2")
    assert says(
        check(node(), node(gpus=0.0))[0], FAIL, "2 nodes with 1 GPUs and 3 CPUs each", "trainer.nnodes=1"
    )
    assert says(check(node(), node(cpus=2.0))[0], FAIL)
    broken = node(host="spark-2", error="ModuleNotFoundError: verl_credit")
    del broken["plugin"]
    assert says(check(node(), broken)[1], FAIL, "spark-2: ModuleNotFoundError: verl_credit")
    assert says(check(node(), node(plugin={"a": False}, host="spark-2"))[1], FAIL, "spark-2 lacks a")


def test_a_cluster_that_does_not_answer(cuda, lab, no_cluster):
    (gone,) = ray_checks.check_ray(CLUSTER, cuda, None, lambda address: "Connection refused")
    assert says(gone, FAIL, "RAY_ADDRESS says 10.0.0.1:6379", "Connection refused", "ray start --head")
    (odd,) = ray_checks.check_ray(
        CLUSTER, cuda, lambda *_: (1, "RuntimeError: Version mismatch"), lambda address: ""
    )
    assert says(odd, FAIL, "Version mismatch")
    (refused,) = ray_checks.check_ray(CLUSTER, lab, None, lambda address: "")
    assert says(
        refused, FAIL, "ray_kwargs.ray_init.num_cpus=16", "ray_kwargs.ray_init.object_store_memory=null"
    )
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert ray_checks.unreachable(f"127.0.0.1:{port}") == ""
    assert ray_checks.unreachable(f"127.0.0.1:{port}") and ray_checks.unreachable("nonsense")


class FakeRay:
    """What the probe uses of ray: two nodes alive and one dead, of which the second has no plugin."""

    def __init__(self):
        self.up = False

    def init(self, **options):
        assert options["address"] == "h:1"
        self.up = True

    def shutdown(self):
        self.up = False

    def nodes(self):
        alive = (("a" * 56, True), ("b" * 56, True), ("c" * 56, False))
        return [
            {"NodeID": i, "Alive": up, "NodeManagerHostname": i[0], "Resources": {"CPU": 4.0}}
            for i, up in alive
        ]

    def remote(self, function):
        assert function is doctor_probes.registered
        return self

    def options(self, num_cpus, max_retries, scheduling_strategy):
        assert num_cpus == 0 and not scheduling_strategy.soft
        return SimpleNamespace(remote=lambda: scheduling_strategy.node_id)

    def get(self, reference, timeout):
        if reference[0] == "b":
            raise RuntimeError("worker:\nModuleNotFoundError: No module named 'verl_credit'")
        return NAMES


def test_the_probe_asks_every_living_node():
    ray = FakeRay()
    found = doctor_probes.cluster(ray, "h:1")["nodes"]
    assert [(n["host"], n["cpus"], n["gpus"]) for n in found] == [("a", 4.0, 0.0), ("b", 4.0, 0.0)]
    assert found[0]["plugin"] == NAMES and "No module named 'verl_credit'" in found[1]["error"]
    assert not ray.up


def test_a_worker_that_ends_without_a_word_is_reported_too():
    ray = FakeRay()
    ray.get = lambda reference, timeout: (_ for _ in ()).throw(RuntimeError())
    found = doctor_probes.cluster(ray, "h:1")["nodes"]
    assert [node["error"] for node in found] == ["RuntimeError: no message"] * 2


def test_an_error_of_cuda_without_a_word_is_reported_too():
    asked = "if torch.version.cuda:"
    assert asked in gather.TORCH_PROBE
    wordless = gather.TORCH_PROBE.replace(asked, f"if True:\n        raise RuntimeError\n    {asked}")
    code, said = gather.in_a_process(["-c", wordless], 120)
    assert code == 0 and json.loads(said.splitlines()[-1])["error"] == "RuntimeError: "


def test_the_probe_refuses_other_questions(capsys):
    assert doctor_probes.main(["cluster"]) == 2 and "usage" in capsys.readouterr().err


# --- the command ---------------------------------------------------------------------------------------------------


def test_a_check_that_breaks_fails_and_ends_no_other():
    def check_odd(facts, config):
        raise KeyError("x")

    broke, other = command.examine(MACHINE, None, [check_odd, lambda *_: passed("other", "fine")])
    assert says(broke, FAIL, "the check itself broke: KeyError: 'x'") and broke.name == "odd"
    assert other.status is PASS


@pytest.fixture
def faked(monkeypatch):
    """The command on MACHINE, with these checks alone."""

    def fake(*checks):
        monkeypatch.setattr(command, "gather", lambda **_: MACHINE)
        monkeypatch.setattr(command, "examine", lambda facts, config: [c(facts, config) for c in checks])

    return fake


def test_exit_codes_and_json(faked, capsys):
    faked(software.check_python)
    assert main(["doctor"]) == 0
    said = capsys.readouterr().out
    assert "Python 3.11.9" in said and said.endswith("1 passed, 1 not applicable\n")
    faked(software.check_python, lambda *_: failed("x", "broken", "whole", "mend it"))
    assert main(["doctor", "--json"]) == 4
    found = json.loads(capsys.readouterr().out)
    assert found["passed"] is False
    assert found["checks"][-1] == {
        "name": "x", "status": "fail", "found": "broken", "right": "whole", "mend": "mend it",
    }  # fmt: skip
    faked(lambda *_: software.warned("x", "odd", "even"))
    assert main(["doctor"]) == 0


def test_a_recipe_that_is_refused_fails_and_the_machine_is_still_looked_at(faked, capsys):
    faked(software.check_python)
    assert main(["doctor", "--config-name", "lab", "algorithm.gama=1"]) == 4
    said = capsys.readouterr().out
    assert "did you mean algorithm.gamma" in said and "Python 3.11.9" in said
    assert main(["doctor", "algorithm.gamma=1"]) == 4
    assert "--config-name NAME" in capsys.readouterr().out


def test_the_facts_of_this_machine_can_be_gathered():
    facts = gather.gather()
    assert facts.python == sys.version_info[:3] and facts.packages["torch"] == torch.__version__
    assert facts.torch.version == torch.__version__ and facts.torch.error == ""
    assert 0 < facts.memory.available <= facts.memory.total and facts.cpus >= 1
    assert len(facts.processes) > 1
    assert shutil.which("nvidia-smi") or facts.driver == ""


def test_a_process_that_takes_too_long_ends_with_what_it_started():
    """`sleep` holds the pipe too: were it left alive, its reader would wait for it."""
    script = "import subprocess, sys; subprocess.Popen(['sleep', '600']); print('x', flush=True); sys.stdin.read(); " \
             "import threading; threading.Event().wait()"  # fmt: skip
    code, said = gather.in_a_process(["-c", script], 1.0)
    assert code is None and said in ("", "x\n")


def test_sizes():
    assert size(3 * GIB) == "3.0 GiB" and size(64 * 2**20) == "64 MiB"


GIVEN = ["data.train_files=t", "data.val_files=v", "search.url=http://127.0.0.1:8000"]
EIGHT = replace(MACHINE, torch=replace(MACHINE.torch, devices=(H100,) * 8))


def test_room_for_what_the_recipe_holds():
    """Qwen3-4B in fp32 with gradients and moments: 16 bytes x 4.02e9 = 60 GiB on one device, an eighth on eight."""
    assert says(check_room(EIGHT, load_config("multihop_qwen3_4b", GIVEN)), PASS, "7.5 GiB weights")
    alone = load_config("multihop_qwen3_4b", [*GIVEN, "hardware=h100x1"])
    assert says(check_room(MACHINE, alone), WARN, "59.9 GiB weights", "lora_rank")
    larger = load_config("multihop_qwen3_4b", [*GIVEN, "hardware=h100x1", "model=qwen3_8b"])
    assert says(check_room(MACHINE, larger), FAIL, "122.1 GiB weights", "at most", "lora_rank")


SPARK = replace(
    MACHINE,
    torch=Torch("2.11.0", "13.0", (GB10,)),
    memory=Memory(121 * GIB, 110 * GIB),
    cpus=20,
    packages={"vllm": "0.24.0"},
)


def test_a_unified_device_is_planned_as_one_whatever_the_recipe_was_made_for():
    config = load_config("multihop_qwen3_4b", [*GIVEN, "hardware=h100x1"])
    (found,) = [p for p in plan_here(config, GB10).phases if p.name == "rollout"]
    assert found.capacity == GB10.total and "host: processes" in found.parts
    assert "host: processes" not in plan_here(load_config("spark_qwen3_4b", GIVEN), H100).phases[0].parts


@pytest.fixture(scope="module")
def spark():
    return load_config("spark_qwen3_4b", GIVEN)


SHARE = first_start.SHARE_KEY


def compiling(config, jobs=None, share=None, **changes):
    config = config.copy()
    OmegaConf.update(
        config, SHARE, config.actor_rollout_ref.rollout.gpu_memory_utilization if share is None else share
    )
    facts = replace(SPARK, environment={} if jobs is None else {"MAX_JOBS": jobs}, **changes)
    return first_start.check_compilation(facts, config)


def test_compilers_have_to_fit_beside_what_is_planned(spark):
    """What the plan leaves of 121 GiB holds a few compilers of 8 GiB; ninja would start 22 on 20 cores."""
    planned = next(p for p in plan_here(spark, GB10).phases if p.name == "rollout").total
    fit = int((121 * GIB - planned) / (8 * GIB))
    assert 2 <= fit < 20
    assert says(
        compiling(spark), WARN, "MAX_JOBS not set: 22 compilers on 20 cores", f"export MAX_JOBS={fit}"
    )
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
    full = Memory(121 * GIB, 40 * GIB)
    found = compiling(unknown, "1", memory=full)
    assert says(
        found, WARN, "36.3 GiB of 40.0 GiB that are free", "at most 0 compilers", f"a smaller {SHARE}"
    )


def test_compilation_where_there_is_nothing_to_say(spark, lab, cuda):
    check = first_start.check_compilation
    assert says(check(MACHINE, cuda), SKIP, "no device shares")
    assert says(check(SPARK, lab), SKIP) and says(check(SPARK, None), SKIP)


FLASHINFER = {"flashinfer-python": "0.6.14"}


@pytest.mark.parametrize(
    "others, status, texts",
    [
        ({"flashinfer-cubin": "0.6.14"}, PASS, ["flashinfer-jit-cache not installed"]),
        ({"flashinfer-cubin": "0.6.14", "flashinfer-jit-cache": "0.6.14+cu130"}, PASS, ["0.6.14+cu130"]),
        (
            {"flashinfer-cubin": "0.6.13"},
            WARN,
            ["flashinfer-cubin==0.6.14 --index-url https://flashinfer.ai/whl"],
        ),
        ({"flashinfer-cubin": "0.6.14.post1"}, WARN, ["pip uninstall flashinfer-cubin"]),
        (
            {"flashinfer-cubin": "0.6.14", "flashinfer-jit-cache": "0.6.1+cu130"},
            WARN,
            ["flashinfer-jit-cache==0.6.14"],
        ),
        ({}, WARN, ["flashinfer-cubin not installed", "fetches and compiles"]),
    ],
)
def test_flashinfer_and_its_packages_are_of_one_version(cuda, others, status, texts):
    facts = replace(MACHINE, packages={**FLASHINFER, **others})
    assert says(first_start.check_flashinfer(facts, cuda), status, *texts)
    assert says(first_start.check_flashinfer(facts, None), status, *texts)


def test_flashinfer_where_it_does_not_matter(cuda, lab):
    check, odd = first_start.check_flashinfer, {**FLASHINFER, "flashinfer-cubin": "0.6.13"}
    assert says(check(MACHINE, cuda), SKIP, "not installed")
    assert says(check(replace(MACHINE, packages=odd), lab), SKIP, "does not roll out with vLLM")
    told = {"FLASHINFER_DISABLE_VERSION_CHECK": "1"}
    assert says(check(replace(MACHINE, packages=odd, environment=told), cuda), WARN, "VERSION_CHECK=1")


@pytest.mark.parametrize(
    "built, device, status",
    [("12.8", GB10, WARN), ("12.9", GB10, WARN), ("13.0", GB10, PASS), ("12.8", H100, PASS)],
)
def test_the_wheel_for_a_spark(cuda, lab, built, device, status):
    facts = replace(MACHINE, torch=Torch("2.11.0", built, (device,)))
    texts = ["on NVIDIA GB10", "built for CUDA 13", "whl/cu130"] if status is WARN else []
    assert says(software.check_torch(facts, cuda), status, *texts)
    assert says(software.check_torch(facts, None), status, *texts)
    assert says(software.check_torch(facts, lab), PASS)


def test_room_where_there_is_nothing_to_say(lab, cuda):
    assert says(check_room(LAPTOP, lab), SKIP, "on a CPU")
    assert says(check_room(LAPTOP, cuda), SKIP, "no device")
    assert says(check_room(MACHINE, None), SKIP, "no recipe")
    unknown = load_config("multihop_qwen3_4b", [*GIVEN, "actor_rollout_ref.model.path=some/where"])
    assert says(check_room(EIGHT, unknown), SKIP, "cannot be planned", "some/where")
