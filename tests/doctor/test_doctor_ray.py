"""Ray: the cluster that a run would join or start, and the plugin in its workers. No Ray is started."""

import json
import socket
from dataclasses import replace
from types import SimpleNamespace

import pytest

from kit.machine import FAIL, LAPTOP, MACHINE, PASS, on_cuda, says
from kit.recipes import load_config
from verl_credit.doctor.context import Context
from verl_credit.doctor.ray_checks import check_cluster, check_plugin, unreachable
from verl_credit.host.process import doctor_probes

LAB = load_config("lab", [])
CUDA = on_cuda(LAB)
NAMES = {"estimator info_gain": True, "loss turn_ppo": True}
CLUSTER = replace(MACHINE, environment={"RAY_ADDRESS": "10.0.0.1:6379"})


@pytest.fixture(autouse=True)
def no_cluster(monkeypatch):
    monkeypatch.setattr("verl_credit.machine.ray_address.cluster_address", lambda e: e.get("RAY_ADDRESS", ""))


NO_GPU = LAB.copy()
NO_GPU.ray_kwargs.ray_init.num_gpus = 0


@pytest.mark.parametrize(
    "facts, config, status, texts",
    [
        (MACHINE, CUDA, PASS, ["starts one here with 16 CPUs and 1 GPUs"]),
        (LAPTOP, LAB, PASS, ["16 CPUs and 1 GPUs"]),  # logical ones
        (LAPTOP, None, PASS, ["16 CPUs and 0 GPUs"]),
        (replace(MACHINE, cpus=3), CUDA, FAIL, ["4 CPUs", "ray_kwargs.ray_init.num_cpus=4"]),
        (LAPTOP, CUDA, FAIL, ["1 GPUs (trainer.n_gpus_per_node)"]),
        (LAPTOP, NO_GPU, FAIL, ["ray_kwargs.ray_init.num_gpus=1"]),
        (MACHINE, on_cuda(LAB, trainer__nnodes=2), FAIL, ["trainer.nnodes=2", "ray start --head here"]),
        (replace(MACHINE, packages={}), CUDA, FAIL, ["ray is not installed"]),
    ],
)
def test_a_local_ray_has_to_have_what_the_recipe_wants(facts, config, status, texts):
    assert says(check_cluster(Context(facts, config)), status, *texts)


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
    odd = check_plugin(Context(CLUSTER, CUDA), lambda *_: (1, "RuntimeError: Version mismatch"))
    assert says(odd, FAIL, "Version mismatch")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert unreachable(f"127.0.0.1:{port}") == ""
    assert unreachable(f"127.0.0.1:{port}") and unreachable("nonsense")


@pytest.mark.parametrize(
    "code, printed, status, texts",
    [
        (0, json.dumps(NAMES), PASS, ["2 names registered"]),
        (0, json.dumps({**NAMES, "loss turn_ppo": False}), FAIL, ["lacks loss turn_ppo"]),
        (1, "ModuleNotFoundError: no verl", FAIL, ["no verl"]),
        (None, "", FAIL, ["no answer in 180 s"]),
        (-9, "", FAIL, ["exit code -9"]),
    ],
)
def test_the_plugin_in_a_fresh_process(code, printed, status, texts):
    def ask(*question):
        assert question == ("plugin",)
        return code, printed

    assert says(check_plugin(Context(MACHINE), ask), status, *texts)


def node(host="spark-1", **changes):
    return {"id": "a", "host": host, "cpus": 20.0, "gpus": 1.0, "plugin": NAMES, **changes}


BROKEN = {
    "id": "b",
    "host": "spark-2",
    "cpus": 20.0,
    "gpus": 1.0,
    "error": "ModuleNotFoundError: verl_credit",
}


@pytest.mark.parametrize(
    "second, resources, of_resources, plugin, of_plugin",
    [
        (node("spark-2"), PASS, ["spark-2 (20 CPUs, 1 GPUs)"], PASS, ["spark-1, spark-2"]),
        (node(gpus=0.0), FAIL, ["2 nodes with 1 GPUs and 3 CPUs each", "trainer.nnodes=1"], PASS, []),
        (node(cpus=2.0), FAIL, [], PASS, []),
        (BROKEN, PASS, [], FAIL, ["spark-2: ModuleNotFoundError: verl_credit"]),
        (node("spark-2", plugin={"a": False}), PASS, [], FAIL, ["spark-2 lacks a"]),
    ],
)
def test_a_cluster_has_to_have_what_the_recipe_wants(second, resources, of_resources, plugin, of_plugin):
    def ask(*question):
        assert question == ("cluster", "10.0.0.1:6379")
        return 0, "a log line\n" + json.dumps({"nodes": [node(), second]}) + "\n"

    found = check_plugin(Context(CLUSTER, on_cuda(LAB, trainer__nnodes=2)), ask)
    assert says(found[0], resources, *of_resources) and says(found[1], plugin, *of_plugin)


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


def test_the_probe_refuses_other_questions(capsys):
    assert doctor_probes.main(["cluster"]) == 2 and "usage" in capsys.readouterr().err
