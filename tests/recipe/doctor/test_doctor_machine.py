"""Memory, disk and processes of machines that are not there; and the facts of this one."""

import shutil
from collections import namedtuple
from dataclasses import replace

import pytest
import torch

from kit.machine import FAIL, LAPTOP, MACHINE, PASS, WARN, cases, on_cuda, says
from kit.recipes import load_config
from verl_credit.recipe import this_machine as gather
from verl_credit.recipe.doctor import machine
from verl_credit.recipe.doctor.context import Context
from verl_credit.recipe.doctor.network import cluster_address
from verl_credit.recipe.this_machine import GIB

LAB = load_config("lab", [])
Usage = namedtuple("Usage", "free")


def with_memory(**changes):
    return replace(MACHINE, memory=replace(MACHINE.memory, **changes))


test_memory_of_the_host = cases(
    machine.check_memory,
    (LAPTOP, None, PASS, "100.0 GiB available of 128.0 GiB"),
    (with_memory(available=3 * GIB), None, WARN, "4.0 GiB for the smallest recipe"),
    (with_memory(limit=16 * GIB, limit_used=13 * GIB), None, WARN, "13.0 GiB of 16.0 GiB used", "--memory"),
    (with_memory(limit=16 * GIB, limit_used=GIB), None, PASS),
    place=0,
)


def test_the_tightest_limit_of_the_control_groups_counts(tmp_path):
    def tree(files):
        for name, text in files.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        memory = gather.memory(tmp_path / "proc", tmp_path / "cgroup")
        return memory.limit, memory.limit_used

    assert tree({}) == (None, 0)
    two = {"proc/self/cgroup": "0::/a/b\n", "cgroup/a/b/memory.max": "max\n", "cgroup/a/memory.max": "1000\n"}
    two |= {"cgroup/a/memory.current": "700\n", "cgroup/a/memory.stat": "anon 5\ninactive_file 300\n"}
    assert tree({**two, "cgroup/memory.max": "9000\n", "cgroup/memory.current": "10\n"}) == (1000, 400)
    # version 1, the path of the host not to be seen
    one = {
        "memory.limit_in_bytes": "500",
        "memory.usage_in_bytes": "120",
        "memory.stat": "total_inactive_file 20\n",
    }
    one = {f"cgroup/memory/{name}": text for name, text in one.items()}
    assert tree({"proc/self/cgroup": "9:memory:/x\n3:cpu:/\n", **one}) == (500, 100)


EVERY = {"trainer__max_actor_ckpt_to_keep": None, "trainer__total_training_steps": 50}


@pytest.mark.parametrize(
    "free, parameters, changes, status, texts",
    [
        (11, GIB, {}, FAIL, ["12.0 GiB a checkpoint"]),
        (35, GIB, {}, WARN, ["36.0 GiB with 2 kept"]),
        (36, GIB, {}, PASS, []),
        (131, GIB, EVERY, WARN, ["132.0 GiB with 10 kept"]),
        (5, GIB, {"actor_rollout_ref__model__lora_rank": 32}, WARN, ["4.0 GiB a checkpoint"]),
        (0.5, GIB, {"trainer__save_freq": -1}, PASS, ["no checkpoints"]),
        (47, GIB, {"keep_checkpoints": [7]}, WARN, ["48.0 GiB with 3 kept"]),
        (35, GIB, {"trainer__save_freq": -1, "keep_checkpoints": [7, 9]}, WARN, ["36.0 GiB with 2 kept"]),
        (0.5, None, {}, WARN, []),
        (2, None, {}, PASS, []),
    ],
)
def test_disk(tmp_path, free, parameters, changes, status, texts):
    (tmp_path / "a").mkdir()
    folders = {
        "run_dir": str(tmp_path / "elsewhere"),
        "trainer__default_local_dir": str(tmp_path / "a" / "b"),
    }
    kept = {"trainer__save_freq": 5, "trainer__max_actor_ckpt_to_keep": 2}
    context = Context(MACHINE, on_cuda(LAB, **folders, **{**kept, **changes}))
    context.parameters = parameters

    def usage(path):
        assert path == tmp_path / "a"  # where checkpoints go, not run_dir
        return Usage(free * GIB)

    assert says(machine.check_disk(context, usage), status, str(tmp_path), *texts)


def test_a_recipe_by_name_needs_room_for_its_checkpoints(tmp_path, hub):
    """With the model's size unknown a GiB was enough for any."""
    given = ["data.train_files=x", "data.val_files=x", "search.url=http://x", f"run_dir={tmp_path}"]
    context = Context(MACHINE, load_config("multihop_qwen3_4b", given))
    found = machine.check_disk(context, lambda path: Usage(40 * GIB))
    assert says(found, FAIL, "45.0 GiB a checkpoint")


def test_where_the_cluster_is(tmp_path):
    noted = tmp_path / "ray_current_cluster"
    noted.write_text("10.0.0.2:6379\n")
    assert cluster_address({"RAY_ADDRESS": "10.0.0.1:6379"}, str(noted)) == "10.0.0.1:6379"
    assert cluster_address({"RAY_ADDRESS": "local"}, str(noted)) == ""
    assert cluster_address({}, str(noted)) == "10.0.0.2:6379"
    assert cluster_address({}, str(tmp_path / "absent")) == ""


@pytest.mark.slow
def test_the_facts_of_this_machine_can_be_gathered():
    facts = gather.gather()
    assert facts.packages["torch"] == torch.__version__
    assert facts.torch.version == torch.__version__ and facts.torch.error == ""
    assert 0 < facts.memory.available <= facts.memory.total and facts.cpus >= 1
    assert shutil.which("nvidia-smi") or facts.driver == ""
