"""Ray: the cluster that a run would join or start, the plugin in its workers, and what its nodes see. No Ray is started."""

import json
import socket
from dataclasses import replace
from pathlib import Path

import pytest

from kit.machine import FAIL, LAPTOP, MACHINE, PASS, SKIP, cases, on_cuda, says
from kit.recipes import OWN, check, load_config
from verl_credit.address import loopback
from verl_credit.errors import ConfigError
from verl_credit.host.process import doctor_probes
from verl_credit.recipe.doctor.checks import CHECKS, examine
from verl_credit.recipe.doctor.cluster import (
    Mark,
    check_cluster,
    check_nodes,
    folders,
    judge_nodes,
    loopback_server,
)
from verl_credit.recipe.doctor.context import Context
from verl_credit.recipe.doctor.network import unreachable
from verl_credit.recipe.doctor.status import skipped

LAB = load_config("lab", [])
CUDA = on_cuda(LAB)
NAMES = {"estimator info_gain": True, "loss turn_ppo": True}
ADDRESS = "10.0.0.1:6379"
CLUSTER = replace(MACHINE, environment={"RAY_ADDRESS": ADDRESS})


@pytest.fixture(autouse=True)
def no_cluster(monkeypatch):
    monkeypatch.setattr(
        "verl_credit.recipe.doctor.network.cluster_address", lambda e: e.get("RAY_ADDRESS", "")
    )


NO_GPU = LAB.copy()
NO_GPU.ray_kwargs.ray_init.num_gpus = 0


test_a_local_ray_has_to_have_what_the_recipe_wants = cases(
    check_cluster,
    (MACHINE, CUDA, PASS, "starts one here with 16 CPUs and 1 GPUs"),
    (LAPTOP, LAB, PASS, "16 CPUs and 16 GPUs"),  # logical ones
    (LAPTOP, None, PASS, "16 CPUs and 0 GPUs"),
    (replace(MACHINE, cpus=3), CUDA, FAIL, "4 CPUs", "ray_kwargs.ray_init.num_cpus=4"),
    (LAPTOP, CUDA, FAIL, "1 GPUs (trainer.n_gpus_per_node)"),
    (LAPTOP, NO_GPU, FAIL, "ray_kwargs.ray_init.num_gpus=1"),
    (MACHINE, on_cuda(LAB, trainer__nnodes=2), FAIL, "trainer.nnodes=2", "ray start --head"),
    (replace(MACHINE, packages={}), CUDA, FAIL, "ray is not installed"),
)


def test_a_cluster_that_the_recipe_names_is_the_one_that_is_asked():
    config = on_cuda(LAB, ray_kwargs__ray_init__address="10.0.0.9:6379")
    found = check_cluster(Context(MACHINE, config), lambda address: f"refused at {address}")
    assert says(found, FAIL, "ray_kwargs.ray_init.address says 10.0.0.9:6379", "refused at 10.0.0.9:6379")


def test_a_cluster_that_does_not_answer():
    gone = check_cluster(Context(CLUSTER, CUDA), lambda address: "Connection refused")
    assert says(gone, FAIL, "RAY_ADDRESS says 10.0.0.1:6379", "Connection refused", "ray start --head")
    refused = check_cluster(Context(CLUSTER, LAB), lambda address: "")
    keys = ["ray_kwargs.ray_init.num_cpus=16", "ray_kwargs.ray_init.object_store_memory=null"]
    assert says(refused, FAIL, *keys)
    assert says(check_cluster(Context(CLUSTER, CUDA), lambda address: ""), PASS, "answers at 10.0.0.1:6379")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert unreachable(f"127.0.0.1:{port}") == ""
    assert unreachable(f"127.0.0.1:{port}") and unreachable("nonsense")


KEYS = [f"ray_kwargs.ray_init.{key}=null" for key in ("num_cpus", "num_gpus", "object_store_memory")]

ALONE = [
    "http://localhost:8000", "http://LOCALHOST.", "http://a.localhost:1", "http://127.9.9.9/retrieve", "http://127.1:80",
    "http://0.0.0.0:8000", "http://0:8000", "http://[::1]:8000", "http://[::ffff:127.0.0.1]:80", "http://2130706433",
]  # fmt: skip
REACHED = [
    "http://10.0.0.1:8000",
    "http://[fd00::1]:80",
    "https://localhost.example.com",
    "http://127.example.com",
]


def test_which_addresses_are_every_machine_s_own():
    assert [url for url in ALONE if not loopback(url)] == []
    assert [url for url in REACHED if loopback(url)] == []


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("run")
    return load_config("lab", [f"run_dir={run_dir}", *KEYS])


def with_url(config, url, searches=4):
    changed = config.copy()
    changed.search.url, changed.search.max_searches = url, searches
    return changed


@pytest.mark.slow
def test_an_address_that_is_each_node_itself_is_refused_before_ray():
    own = [*OWN[:3], "trainer.nnodes=2"]
    check(*own, "search.url=http://10.0.0.1:8000", recipe="search_cpu")
    given = "search.url=[http://10.0.0.1:8000,http://me:secret@127.0.0.1:8000]"
    with pytest.raises(ConfigError) as error:
        check(*own, given, recipe="search_cpu")
    said = str(error.value)
    assert "search.url=http://***@127.0.0.1:8000 with trainer.nnodes=2" in said and "secret" not in said
    assert "the address by which all of them reach the server" in said
    check(*own[:3], given, recipe="search_cpu")  # one node


def test_what_a_run_writes_outside_its_folder_is_looked_at_too(config, tmp_path):
    run_dir = Path(config.run_dir)
    assert folders(config) == [("run_dir", run_dir)]
    elsewhere = config.copy()
    elsewhere.trainer.default_local_dir = str(tmp_path / "checkpoints")
    assert folders(elsewhere) == [
        ("run_dir", run_dir), ("trainer.default_local_dir", tmp_path / "checkpoints"),
    ]  # fmt: skip


MARKS = [
    Mark("run_dir", "/runs/a", "/runs/a/x", "11"),
    Mark("trainer.default_local_dir", "/big", "/big/y", "22"),
]


def reader(host="spark-1", found=("11", "22"), cpus=20.0, gpus=16.0, plugin=NAMES, **error):
    return {"host": host, "cpus": cpus, "gpus": gpus, **(error or {"plugin": plugin, "found": list(found)})}


def test_every_node_has_to_read_what_was_written_here(config):
    two = [reader(), reader("spark-2")]
    head = reader("head", ("No such file or directory", ""), cpus=0.0)  # none of ours runs there
    seen = judge_nodes([*two, head], MARKS, with_url(config, "http://10.0.0.1:8000"))
    assert says(seen, PASS, "spark-1, spark-2 see run_dir=/runs/a and trainer.default_local_dir=/big")


@pytest.mark.parametrize(
    "node, texts",
    [
        (reader("spark-2", ("No such file or directory", "22")),
         ["run_dir=/runs/a", "not seen by spark-2 (No such file or directory)", "all nodes share"]),
        (reader("spark-2", ("11", "a file of the same name")), ["trainer.default_local_dir=/big", "spark-2"]),
        (reader("spark-2", error="RuntimeError: gone"), ["spark-2: RuntimeError: gone"]),
        (reader("spark-2", plugin={"loss turn_ppo": False}), ["spark-2: lacks loss turn_ppo"]),
    ],
)  # fmt: skip
def test_a_node_that_cannot_work_is_named(config, node, texts):
    assert says(judge_nodes([reader(), node], MARKS, config), FAIL, *texts)


@pytest.mark.parametrize("few", [{"gpus": 0.0}, {"cpus": 2.0}])
def test_a_node_too_small_for_a_rank_does_not_count(config, few):
    small = judge_nodes([reader(**few)], MARKS, config)
    assert says(small, FAIL, "1 nodes with 1 GPUs and 3 CPUs each", "trainer.nnodes=1")


def test_a_server_that_only_one_of_the_machines_reaches(config):
    two = [reader(), reader("spark-2")]
    lab = judge_nodes(two, MARKS, config)
    assert says(lab, FAIL, "the run's own server listens on this machine alone", "spark-1, spark-2")
    url = judge_nodes(two, MARKS, with_url(config, ["http://a", "http://localhost:8000"]))
    assert says(url, FAIL, "search.url=http://localhost:8000 is another machine on every node")
    assert says(judge_nodes([reader(), reader()], MARKS, config), PASS)  # two raylets of one machine
    assert loopback_server(with_url(config, "http://localhost", searches=0)) == ""


def test_the_cluster_is_asked_for_files_that_are_there_and_then_gone(config, tmp_path):
    asked = []

    def ask(address, paths):
        assert address == ADDRESS
        asked.extend(json.loads(paths))
        found = doctor_probes.read_files(json.loads(paths))
        return 0, json.dumps([reader(found=found), reader("spark-2", found)])

    shared = with_url(config, "http://10.0.0.1:8000")
    shared.run_dir = str(tmp_path / "not" / "made" / "yet")
    assert says(check_nodes(Context(CLUSTER, shared), ask), PASS, "spark-1, spark-2 see run_dir=")
    assert [Path(path).parent for path in asked] == [tmp_path]
    assert list(tmp_path.iterdir()) == []
    assert doctor_probes.read_files(asked) == ["No such file or directory"]


def test_where_there_is_nothing_to_ask(config):
    def ask(*_):
        pytest.fail("asked")

    assert says(check_nodes(Context(MACHINE, config), ask), SKIP, "no cluster")
    (entry,) = [entry for entry in CHECKS if entry.name == "nodes"]
    for lacking in ("recipe", "ray"):
        assert says(
            examine(Context(CLUSTER, config), [entry], [skipped("x", lacking)])[1], SKIP, f"see {lacking}"
        )


@pytest.mark.parametrize("code, said", [(None, ""), (1, "RuntimeError: Version mismatch"), (0, "no JSON")])
def test_a_cluster_that_gives_no_answer(config, code, said):
    found = check_nodes(Context(CLUSTER, config), lambda *_: (code, said))
    assert says(found, FAIL, f"the cluster at {ADDRESS}", said)
