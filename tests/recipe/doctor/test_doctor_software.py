"""Python, torch, packages, variables, vLLM and FlashInfer, on machines that are not there."""

from dataclasses import replace
from importlib.metadata import entry_points
from pathlib import Path
from types import SimpleNamespace

import pytest
import verl
from packaging.specifiers import SpecifierSet

from kit.machine import FAIL, GB10, H100, LAPTOP, MACHINE, PASS, SKIP, WARN, cases, on_cuda, says
from kit.recipes import load_config
from verl_credit.names import COLOCATE_MODE
from verl_credit.recipe import machine
from verl_credit.recipe.doctor import software
from verl_credit.recipe.doctor.context import Context
from verl_credit.recipe.doctor.software import requirements_of
from verl_credit.recipe.machine import Torch

LAB = load_config("lab", [])
CUDA = on_cuda(LAB)
MODEL = "+actor_rollout_ref.model.override_config"
ABORTS = on_cuda(LAB)
ABORTS.trainer.v1.trainer_mode = COLOCATE_MODE


test_python = cases(
    software.check_python,
    (replace(MACHINE, python=(3, 10, 14)), None, FAIL),
    (replace(MACHINE, python=(3, 11, 0)), None, PASS),
    (replace(MACHINE, python=(3, 12, 9)), None, PASS),
    (replace(MACHINE, python=(3, 13, 0)), None, FAIL),
)
BROKEN = replace(MACHINE, torch=Torch(None, error="no libcudart"))
ON_GB10 = ["on NVIDIA GB10", "built for CUDA 13", "whl/cu130"]


def built_for(cuda, device):
    return replace(MACHINE, torch=Torch("2.11.0", cuda, (device,)))


test_torch = cases(
    software.check_torch,
    (MACHINE, CUDA, PASS, "CUDA 13.0"),
    (LAPTOP, LAB, PASS, "CPUs only"),
    (LAPTOP, None, PASS),
    (LAPTOP, CUDA, FAIL, "CPUs only, and trainer.device=cuda", "pip install --force-reinstall"),
    (BROKEN, None, FAIL, "no libcudart"),
    (built_for("12.9", GB10), CUDA, WARN, *ON_GB10),
    (built_for("12.9", GB10), None, WARN, *ON_GB10),
    (built_for("12.9", GB10), LAB, PASS),
    (built_for("12.8", GB10), CUDA, WARN, *ON_GB10),
    (built_for("12.8", GB10), None, WARN, *ON_GB10),
    (built_for("13.0", GB10), CUDA, PASS),
    (built_for("12.8", H100), CUDA, PASS),
)


@pytest.mark.parametrize(
    "policy, status",
    [
        (None, PASS), ("auto", PASS), (" AUTO ", PASS), ("verl_credit", PASS), ("other, Verl_Credit", PASS),
        ("none", FAIL), (" None", FAIL), ("", FAIL), ("other", FAIL), ("verl_credit2,auto", FAIL),
    ],
)  # fmt: skip
def test_a_list_of_plugins_without_ours(policy, status):
    facts = replace(LAPTOP, environment={} if policy is None else {software.PLUGINS: policy})
    texts = [f"VERL_USE_EXTERNAL_PLUGINS={policy}", "verl_credit"] if status is FAIL else []
    assert says(software.check_environment(Context(facts, LAB)), status, *texts)
    assert says(software.check_environment(Context(facts)), status, *texts)


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


VERLS = ["transformers<5.11,>=5.5.3,!=5.6.0", "tensordict<=0.10.0", "vllm==0.24.0; extra == 'vllm'"]
OURS = ["a<2; extra == 'verl'", "b"]


@pytest.mark.parametrize(
    "lines, extra, installed, outside, status, texts",
    [
        (VERLS, "", {"transformers": "5.10.4", "tensordict": "0.10.0"}, FAIL, PASS, ["2 packages"]),
        (VERLS, "", {"transformers": "5.11.0", "tensordict": "0.10.0"}, FAIL, FAIL,
         ["transformers 5.11.0", "pip install 'transformers"]),
        (VERLS, "", {"transformers": "5.6.0", "tensordict": "0.10.0"}, FAIL, FAIL, ["transformers 5.6.0"]),
        (VERLS, "", {"transformers": "5.9.0"}, FAIL, FAIL, ["tensordict is missing"]),
        (VERLS, "", {"transformers": "5.9.0", "tensordict": "0.11.0rc1"}, FAIL, FAIL, ["tensordict 0.11.0rc1"]),
        (OURS, "verl", {"a": "2.0", "b": "1"}, WARN, WARN, ["a 2.0", "pip install 'a<2'"]),
        (OURS, "verl", {"a": "2.0"}, WARN, FAIL, ["b is missing"]),
        (None, "", {}, FAIL, FAIL, ["not installed"]),
    ],
)  # fmt: skip
def test_ranges_of_metadata(lines, extra, installed, outside, status, texts):
    """Of ours a version out of range is a warning; what is missing is a failure."""
    judge = software.warned if outside is WARN else software.failed
    found = software.judge_requirements("x", lines, extra, installed, judge)
    assert says(found, status, *texts) and found.name == "x"


def test_these_are_the_requirements_that_verl_really_has():
    lines = requirements_of("verl")
    assert any(line.startswith("transformers") for line in lines) and requirements_of("no-such") is None
    assert software.pinned(lines) == "==0.24.0"


def test_a_transformers_above_verls_range_and_inside_ours_passes():
    """verl's metadata end below 5.11; what they leave out in between, and what we have not run, is still refused."""
    tried = {"transformers": SpecifierSet(">=5.5.3,<5.20")}
    for version, status in {
        "5.10.4": PASS,
        "5.19.0": PASS,
        "5.20.0": FAIL,
        "5.6.0": FAIL,
        "5.5.2": FAIL,
    }.items():
        packages = {"transformers": version, "tensordict": "0.10.0"}
        found = software.judge_requirements("x", VERLS, "", packages, tried=tried)
        assert says(found, status), version
        assert ("above verl's range and inside ours" in found.found) is (version == "5.19.0")


def test_our_range_is_the_one_that_is_tried():
    facts = replace(MACHINE, packages={**machine.installed(), "transformers": "5.19.0"})
    verls, ours = software.check_requirements(Context(facts, None))
    assert says(verls, PASS, "transformers 5.19.0 is above verl's range and inside ours")
    assert ours.status is PASS


def both(**packages):
    return replace(MACHINE, packages=packages)


test_combinations = cases(
    software.check_combinations,
    (both(transformers="5.10.4", tokenizers="0.22.2"), None, PASS),
    (
        both(transformers="5.10.4", tokenizers="0.23.1"),
        None,
        FAIL,
        "does not import",
        "pip install 'transformers==5.10.4'",
    ),
    (
        both(transformers="5.15.1", tokenizers="0.23.2"),
        LAB,
        FAIL,
        "transformers <5.16 wants another tokenizers",
    ),
    (both(transformers="5.16.0", tokenizers="0.23.1"), CUDA, PASS),
    (
        both(transformers="5.19.0", tokenizers="0.22.2"),
        CUDA,
        FAIL,
        "transformers 5.19.0 beside tokenizers 0.22.2",
    ),
    (both(transformers="5.19.0"), None, PASS),
    (both(transformers="mine", tokenizers="0.22.2"), None, PASS),
    (both(vllm="0.31.0"), ABORTS, PASS),
    (both(vllm="0.32.0+cpu"), ABORTS, FAIL, "vllm 0.32.0+cpu", "pip install 'vllm<0.32'"),
    (both(vllm="0.32.0"), CUDA, PASS),
)


def installed(version):
    return replace(MACHINE, packages={"vllm": version} if version else {})


HF, ON_CPU = on_cuda(LAB, actor_rollout_ref__rollout__name="hf"), on_cuda(LAB, trainer__device="cpu")
test_vllm = cases(
    software.check_vllm,
    (installed("0.24.0"), CUDA, PASS, "the one verl pins"),
    (installed("0.24.0+cu130"), CUDA, PASS, "the one verl pins"),
    (installed("0.21.0"), CUDA, WARN, "vllm 0.21.0", "vllm==0.24.0", "our range is <0.33,>=0.24"),
    (installed("0.32.0"), CUDA, PASS, "vllm 0.32.0, in our range <0.33,>=0.24", "verl pins 0.24.0"),
    (installed("0.33.0"), CUDA, WARN, "vllm 0.33.0"),
    (installed("0.17.1"), CUDA, FAIL, "older than 0.18.0", "pip install 'vllm==0.24.0'"),
    (installed("0.17.1"), HF, WARN, "older than 0.18.0"),
    (installed(None), CUDA, FAIL, "not installed"),
    (installed(None), HF, SKIP, "rolls out with hf"),
    (installed("mine"), CUDA, FAIL, "no version number"),
    (installed("0.27.1+cpu"), CUDA, FAIL, "a CPU build, and trainer.device=cuda"),
    (installed("0.27.1+cpu"), ON_CPU, PASS, "a CPU build; not compared"),
)


SGLANG = on_cuda(LAB, actor_rollout_ref__rollout__name="sglang")
test_sglang = cases(
    software.check_sglang,
    (MACHINE, CUDA, SKIP, "does not roll out with sglang"),
    (MACHINE, None, SKIP),
    (MACHINE, SGLANG, FAIL, "sglang is not installed", "pip install 'sglang==0.5.12'"),
    (both(sglang="0.5.12"), SGLANG, WARN, "sglang 0.5.12", "never on a GPU", "rollout_probs_diff_max"),
)


@pytest.mark.parametrize(
    "cubin, jit_cache, status, texts",
    [
        ("0.6.14", None, PASS, ["flashinfer-jit-cache not installed"]),
        ("0.6.14", "0.6.14+cu130", PASS, ["0.6.14+cu130"]),
        ("0.6.13", None, WARN, ["flashinfer-cubin==0.6.14 --index-url https://flashinfer.ai/whl"]),
        ("0.6.14.post1", None, WARN, ["pip uninstall flashinfer-cubin"]),
        ("0.6.14", "0.6.1+cu130", WARN, ["flashinfer-jit-cache==0.6.14"]),
        (None, None, WARN, ["flashinfer-cubin not installed", "fetches and compiles"]),
    ],
)
def test_flashinfer_and_its_packages_are_of_one_version(cubin, jit_cache, status, texts):
    others = {"flashinfer-cubin": cubin, "flashinfer-jit-cache": jit_cache}
    facts = replace(
        MACHINE, packages={"flashinfer-python": "0.6.14"} | {n: v for n, v in others.items() if v}
    )
    assert says(software.check_flashinfer(Context(facts, CUDA)), status, *texts)
    assert says(software.check_flashinfer(Context(facts)), status, *texts)


ODD = replace(MACHINE, packages={"flashinfer-python": "0.6.14", "flashinfer-cubin": "0.6.13"})
test_flashinfer_where_it_does_not_matter = cases(
    software.check_flashinfer,
    (MACHINE, CUDA, SKIP, "not installed"),
    (ODD, LAB, SKIP, "does not roll out with vLLM"),
    (replace(ODD, environment={"FLASHINFER_DISABLE_VERSION_CHECK": "1"}), CUDA, WARN, "VERSION_CHECK=1"),
)
