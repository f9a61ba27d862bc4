"""Several machines: an address that is another machine on each of them, a folder that not all of them see."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from kit.machine import FAIL, MACHINE, PASS, SKIP, says
from kit.recipes import OWN, check, load_config
from verl_credit.doctor.checks import CHECKS, examine
from verl_credit.doctor.context import Context
from verl_credit.doctor.node_checks import Mark, check_nodes, folders, judge_nodes, loopback_server
from verl_credit.doctor.result import skipped
from verl_credit.errors import ConfigError
from verl_credit.host.process import doctor_probes
from verl_credit.search.servers import loopback

ADDRESS = "10.0.0.1:6379"
CLUSTER = replace(MACHINE, environment={"RAY_ADDRESS": ADDRESS})
KEYS = [f"ray_kwargs.ray_init.{key}=null" for key in ("num_cpus", "num_gpus", "object_store_memory")]

ALONE = [
    "http://localhost:8000", "http://LOCALHOST.", "http://a.localhost:1", "http://127.0.0.1:8000/retrieve", "http://127.9.9.9",
    "http://127.1:80", "http://0.0.0.0:8000", "http://0:8000", "http://[::1]:8000", "http://[::]:80",
    "http://[::ffff:127.0.0.1]:80", "http://me:secret@127.0.0.1:1", "http://2130706433",
]  # fmt: skip
REACHED = [
    "http://10.0.0.1:8000", "http://spark-1:8000", "http://[fd00::1]:80", "https://localhost.example.com",
    "http://128.0.0.1", "http://127.example.com", "http://fe80",
]  # fmt: skip


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


def node(host="spark-1", found=("11", "22"), cpus=20.0, **error):
    return {"host": host, "cpus": cpus, **(error or {"found": list(found)})}


def test_every_node_has_to_read_what_was_written_here(config):
    two = [node(), node("spark-2")]
    seen = judge_nodes(two, MARKS, with_url(config, "http://10.0.0.1:8000"))
    assert says(seen, PASS, "spark-1, spark-2 see run_dir=/runs/a and trainer.default_local_dir=/big")
    no_file = node("spark-2", ("No such file or directory", "22"))
    blind = judge_nodes([node(), no_file], MARKS, config)
    assert says(
        blind, FAIL, "run_dir=/runs/a", "not seen by spark-2 (No such file or directory)", "all nodes share"
    )
    other = judge_nodes([node(), node("spark-2", ("11", "a file of the same name"))], MARKS, config)
    assert says(other, FAIL, "trainer.default_local_dir=/big", "spark-2")
    broken = judge_nodes([node(), node("spark-2", error="RuntimeError: gone")], MARKS, config)
    assert says(broken, FAIL, "spark-2: RuntimeError: gone")
    head = node("head", ("No such file or directory", ""), cpus=0.0)
    assert says(
        judge_nodes([*two, head], MARKS, with_url(config, "http://a")), PASS
    )  # none of ours runs there


def test_a_server_that_only_one_of_the_machines_reaches(config):
    two = [node(), node("spark-2")]
    lab = judge_nodes(two, MARKS, config)
    assert says(lab, FAIL, "the lab's own server listens on this machine alone", "spark-1, spark-2")
    url = judge_nodes(two, MARKS, with_url(config, ["http://a", "http://localhost:8000"]))
    assert says(url, FAIL, "search.url=http://localhost:8000 is another machine on every node")
    assert says(judge_nodes([node(), node()], MARKS, config), PASS)  # two raylets of one machine
    assert loopback_server(with_url(config, "http://localhost", searches=0)) == ""


def test_the_cluster_is_asked_for_files_that_are_there_and_then_gone(config, tmp_path):
    asked = []

    def ask(question, address, paths):
        assert (question, address) == ("files", ADDRESS)
        asked.extend(json.loads(paths))
        found = doctor_probes.read_files(json.loads(paths))
        return 0, json.dumps({"nodes": [node(found=found), node("spark-2", found)]})

    shared = with_url(config, "http://10.0.0.1:8000")
    shared.run_dir = str(tmp_path / "not" / "made" / "yet")
    assert says(check_nodes(Context(CLUSTER, shared), ask), PASS, "spark-1, spark-2 see run_dir=")
    assert [Path(path).parent for path in asked] == [tmp_path]
    assert list(tmp_path.iterdir()) == []


def test_where_there_is_nothing_to_ask(config, monkeypatch):
    def ask(*_):
        pytest.fail("asked")

    monkeypatch.setattr("verl_credit.machine.ray_address.cluster_address", lambda e: e.get("RAY_ADDRESS", ""))
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


def test_what_a_node_reads_or_meets(tmp_path):
    (tmp_path / "a").write_text("11")
    paths = [tmp_path / "a", tmp_path / "b", tmp_path]
    assert doctor_probes.read_files([str(path) for path in paths]) == [
        "11", "No such file or directory", "Is a directory",
    ]  # fmt: skip
