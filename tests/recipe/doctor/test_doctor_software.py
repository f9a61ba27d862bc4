"""Torch, packages, variables and engines, on machines that are not there."""

from dataclasses import replace
from importlib.metadata import entry_points
from pathlib import Path
from types import SimpleNamespace

import pytest
import verl

from kit.machine import FAIL, GB10, H100, LAPTOP, MACHINE, PASS, SKIP, WARN, cases, on_cuda
from kit.recipes import load_config
from verl_credit.names import COLOCATE_MODE
from verl_credit.recipe.doctor import software
from verl_credit.recipe.doctor.software import requirements_of
from verl_credit.recipe.this_machine import Torch

LAB = load_config("lab", [])
CUDA = on_cuda(LAB)
ABORTS = on_cuda(LAB)
ABORTS.trainer.v1.trainer_mode = COLOCATE_MODE


BROKEN = replace(MACHINE, torch=Torch(None, error="no libcudart"))
ON_GB10 = ["on NVIDIA GB10", "built for CUDA 13", "whl/cu130"]


def built_for(cuda, device):
    return replace(MACHINE, torch=Torch("2.11.0", cuda, (device,)))


test_torch = cases(
    software.check_torch,
    (MACHINE, CUDA, PASS, "CUDA 13.0"),
    (LAPTOP, LAB, PASS, "CPUs only"),
    (LAPTOP, None, PASS),
    (
        LAPTOP,
        CUDA,
        FAIL,
        "CPUs only",
        "no NVIDIA driver",
        "hardware=laptop",
        "actor_rollout_ref.rollout.name=hf",
    ),
    (
        replace(LAPTOP, driver="13.0"),
        CUDA,
        FAIL,
        "CPUs only, and trainer.device=cuda",
        "pip install --force-reinstall",
    ),
    (BROKEN, None, FAIL, "no libcudart"),
    (built_for("12.9", GB10), CUDA, WARN, *ON_GB10),
    (built_for("12.9", GB10), LAB, PASS),
    (built_for("12.8", GB10), None, WARN, *ON_GB10),
    (built_for("13.0", GB10), CUDA, PASS),
    (built_for("12.8", H100), CUDA, PASS),
)


test_a_list_of_plugins_without_ours = cases(
    software.check_environment,
    (replace(LAPTOP, environment={}), LAB, PASS),
    (replace(LAPTOP, environment={software.PLUGINS: "other, Verl_Credit"}), LAB, PASS),
    (replace(LAPTOP, environment={software.PLUGINS: "other"}), None, FAIL, "VERL_USE_EXTERNAL_PLUGINS=other"),
)


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


def on_platform(platform):
    return replace(MACHINE, environment={software.PLATFORM: platform})


test_a_platform_that_is_not_the_recipes = cases(
    software.check_environment,
    (on_platform("nvidia"), LAB, FAIL, "VERL_PLATFORM=nvidia, and trainer.device=cpu", "unset VERL_PLATFORM"),
    (on_platform("cpu"), CUDA, FAIL, "VERL_PLATFORM=cpu, and trainer.device=cuda"),
    (on_platform("cpu"), LAB, PASS),
    (on_platform("nvidia"), CUDA, PASS),
    (on_platform("cpu"), None, PASS),
)


def test_these_are_the_requirements_that_verl_really_has():
    assert software.pinned(requirements_of("verl"), "vllm") == "==0.24.0" and requirements_of("no-such") == []


def both(**packages):
    return replace(MACHINE, packages=packages)


def installed(version):
    return replace(MACHINE, packages={"vllm": version} if version else {})


test_versions = cases(
    software.check_versions,
    (both(torch="2.15.0+cpu", transformers="5.22.2", unknown="9"), None, PASS, "in its range"),
    (both(torch="2.16.0", transformers="5.24.0"), None, WARN,
     "torch 2.16.0 (our range is <2.16,>=2.11, of which 2.11.0, 2.13.0, 2.14.1, 2.15.0 ran)", "transformers 5.24.0 (",
     "pip install 'torch<2.16,>=2.11' 'transformers<5.23,>=5.5.3'"),
    (both(ray="2.10.0"), LAB, WARN, "ray 2.10.0", "pip install 'ray<3,>=2.50'"),
    (both(statsmodels="0.1"), None, PASS),  # of another extra
)  # fmt: skip


def test_what_ran_is_what_the_page_says():
    page = (Path(__file__).parents[3] / "docs" / "compatibility.md").read_text().lower()
    rows = {line.split("|")[1].strip(): line for line in reversed(page.splitlines()) if line.startswith("| ")}
    assert [
        (name, v) for name, ran in software.TRIED.items() for v in ran.split(", ") if v not in rows[name]
    ] == []


HF, ON_CPU = on_cuda(LAB, actor_rollout_ref__rollout__name="hf"), on_cuda(LAB, trainer__device="cpu")
SGLANG = on_cuda(LAB, actor_rollout_ref__rollout__name="sglang")
test_engine = cases(
    software.check_engine,
    (installed("0.24.0"), CUDA, PASS, "vllm 0.24.0", "vllm==0.24.0"),
    (installed("0.24.0+cu130"), CUDA, PASS),
    (installed("0.21.0"), CUDA, WARN, "vllm 0.21.0", "vllm==0.24.0", "our range is <0.33,>=0.24"),
    (installed("0.32.0"), CUDA, PASS, "vllm 0.32.0", "our range is <0.33,>=0.24"),
    (installed("0.33.0"), CUDA, WARN, "vllm 0.33.0"),
    (installed("0.17.1"), CUDA, FAIL, "0.18.0", "pip install 'vllm==0.24.0'"),
    (installed(None), CUDA, FAIL, "not installed"),
    (
        installed(None),
        ON_CPU,
        FAIL,
        "not installed",
        "actor_rollout_ref.rollout.name=hf",
        "pip install 'vllm==",
    ),
    (installed(None), HF, SKIP, "rolls out with hf"),
    (installed("mine"), CUDA, FAIL, "vllm mine"),
    (installed("0.27.1+cpu"), CUDA, FAIL, "a CPU build", "trainer.device=cuda"),
    (installed("0.27.1+cpu"), ON_CPU, PASS, "a CPU build; not compared"),
    (installed("0.31.0"), ABORTS, PASS),
    (installed("0.32.0+cpu"), ABORTS, FAIL, "vllm 0.32.0+cpu", "pip install 'vllm<0.32'"),
    (MACHINE, SGLANG, FAIL, "sglang is not installed", "pip install 'sglang==0.5.12'"),
    (both(sglang="0.5.12"), SGLANG, WARN, "sglang 0.5.12", "no GPU has run it"),
)

FLASH = on_cuda(LAB, actor_rollout_ref__model__override_config__attn_implementation="flash_attention_2")
test_attention = cases(
    software.check_attention,
    (installed(None), FLASH, FAIL, "attn_implementation=flash_attention_2", "attn_implementation=auto"),
    (both(**{"flash-attn": "2.8.3"}), FLASH, PASS),
    (installed(None), CUDA, PASS, "attn_implementation=auto"),
)
