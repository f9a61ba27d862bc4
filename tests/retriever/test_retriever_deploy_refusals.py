"""What `deploy` refuses, in one line each. Marked slow because Ray Serve takes seconds to import."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from ray.exceptions import RayError

from kit.ray_cluster import free_port
from verl_credit_retriever import cli as commands
from verl_credit_retriever.cli import main
from verl_credit_retriever.http.batcher import HELD
from verl_credit_retriever.index.parts import Part
from verl_credit_retriever.serve import EXIT_PORT_IN_USE, CannotListen
from verl_credit_retriever.settings import Limits, ServeSettings


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--replicas=0"], "--replicas=0; at least 1"),
        (["--port=0"], "--port=0; every machine has the same one: name it"),
        (["--host=0.0.0.0"], "--host=0.0.0.0: not loopback; add --allow-remote"),
        (
            ["--max-request-queries=9", "--max-queue-queries=8"],
            "max_request_queries=9; at most max_queue_queries=8",
        ),
    ],
)
def test_a_wrong_argument_is_refused_before_ray_is_asked(capsys, arguments, words):
    assert main(["deploy", "--index=index", "--encoder=encoder", *arguments]) == 2
    assert words in capsys.readouterr().err


def test_a_port_in_use_ends_deploy_as_it_ends_serve(monkeypatch, capsys):
    def deploy(*_, **__):
        raise CannotListen("--port=8000: Failed to bind")

    monkeypatch.setattr(commands, "_cluster", lambda _: SimpleNamespace(deploy=deploy))
    assert main(["deploy", "--index=index", "--encoder=encoder"]) == EXIT_PORT_IN_USE
    assert capsys.readouterr().err == "error: --port=8000: Failed to bind\n"


def test_an_installation_without_what_deploys_says_so(monkeypatch, capsys):
    monkeypatch.setattr(commands, "entry_points", lambda **_: ())
    assert main(["undeploy"]) == 2
    assert "no package registers 'ray' in verl_credit_retriever.deploy" in capsys.readouterr().err


def test_without_ray_deploy_names_what_to_install(monkeypatch, capsys):
    for module in ("verl_credit.host.deploy.ray_serve", "ray"):
        monkeypatch.setitem(sys.modules, module, None)
    assert main(["undeploy"]) == 2
    assert "pip install 'verl-credit[retriever-ray]'" in capsys.readouterr().err


def settings(**given):
    return ServeSettings(**{"index": Path("index"), "encoder": Path("encoder")} | given)


@pytest.mark.slow
class TestOnACluster:
    @pytest.fixture
    def cluster(self, monkeypatch):
        """The module, with a cluster of 8 CPUs on which nothing is deployed."""
        from verl_credit.host.deploy import ray_serve as cluster

        monkeypatch.setattr(cluster.serve, "status", lambda: SimpleNamespace(applications={}))
        monkeypatch.setattr(cluster.ray, "cluster_resources", lambda: {"CPU": 8.0})
        nodes = [(True, {"CPU": 4.0}), (True, {}), (True, {"CPU": 2.0}), (False, {"CPU": 4.0})]
        monkeypatch.setattr(
            cluster.ray, "nodes", lambda: [{"Alive": alive, "Resources": has} for alive, has in nodes]
        )
        return cluster

    def test_no_cluster(self, capsys):
        address = f"127.0.0.1:{free_port()}"
        assert main(["undeploy", f"--address={address}"]) == 2
        problem = capsys.readouterr().err
        assert problem.startswith(f"error: --address={address}: no Ray cluster") and problem.count("\n") == 1

    def test_more_processes_than_cpus(self, cluster):
        with pytest.raises(ValueError, match=r"9 CPUs; the cluster has 8"):
            cluster.require_room(settings(), shards=2, replicas=3)
        cluster.require_room(settings(), shards=3, replicas=2)

    def test_only_machines_that_can_hold_a_process_count(self, cluster, monkeypatch):
        """With a head node without CPUs among them, too few replicas were allowed on each, and some never started."""
        found = [cluster.require_room(settings(threads=n), shards=1, replicas=1) for n in (1, 2, 3, 4)]
        assert found == [2, 2, 1, 1]
        monkeypatch.setattr(cluster.ray, "cluster_resources", lambda: {"CPU": 80.0})
        with pytest.raises(ValueError, match="--threads=5; .* 4 CPUs"):
            cluster.require_room(settings(threads=5), shards=1, replicas=1)

    @pytest.mark.parametrize(
        "gpus, threads, replicas, room",
        [
            ((0, 0, 0), 1, 1, 0),
            ((0, 4, 0), 1, 1, 0),  # the machine with GPUs has no CPU
            ((1, 0, 0), 1, 2, 1),
            ((4, 0, 0), 2, 2, None),
            ((1, 0, 1), 1, 2, None),
        ],
    )
    def test_fronts_on_gpus_need_gpus_with_cpus_beside_them(
        self, cluster, monkeypatch, gpus, threads, replicas, room
    ):
        """A cluster without GPUs was waited for, 30 minutes."""
        nodes = [
            node | {"Resources": node["Resources"] | ({"GPU": gpu} if gpu else {})}
            for node, gpu in zip(cluster.ray.nodes()[:3], gpus, strict=True)
        ]
        monkeypatch.setattr(cluster.ray, "nodes", lambda: nodes)
        given = {"settings": settings(threads=threads, device="cuda"), "shards": 1, "replicas": replicas}
        if room is None:
            assert cluster.require_room(**given) == 2
            return
        with pytest.raises(ValueError, match=f"--device=cuda --replicas={replicas}: .* room for {room};"):
            cluster.require_room(**given)

    @pytest.mark.parametrize("queue", [16, 8192])
    def test_the_front_itself_refuses_what_is_too_much(self, cluster, queue):
        """Ray admits more requests than the queue and the line before it hold, and the rest has a limit."""
        given = settings(limits=Limits(max_request_queries=16, max_queue_queries=queue))
        app = cluster._application(given, [Part(0, 1, 0, 9, "f")], "exact", 1, 1)
        front = app._bound_deployment
        assert front.name == cluster.FRONT
        assert front.max_ongoing_requests > queue + max(HELD, queue)
        assert front.max_queued_requests >= HELD

    def test_serve_that_cannot_listen(self, cluster, monkeypatch):
        def start(**_):
            raise RayError("Traceback ...\nRuntimeError: Failed to bind to address '127.0.0.1:8000'.")

        monkeypatch.setattr(cluster.serve, "start", start)
        monkeypatch.setattr(cluster, "_remove", lambda: None)
        with pytest.raises(CannotListen, match=r"--port=8000: .*Failed to bind to address '127.0.0.1:8000'"):
            cluster._start_serve(SimpleNamespace(host="127.0.0.1", port=8000))

    def test_what_is_deployed_is_not_deployed_over(self, cluster, monkeypatch, folders):
        with pytest.raises(ValueError, match="nothing is deployed as 'verl-credit-retriever'"):
            cluster.undeploy()
        monkeypatch.setattr(
            cluster.serve, "status", lambda: SimpleNamespace(applications={cluster.APP: None})
        )
        with pytest.raises(ValueError, match="deployed on this cluster already"):
            cluster.deploy(settings(index=folders / "index"), shards=1, replicas=1, ready_seconds=1)

    def test_serve_that_listens_elsewhere(self, cluster, monkeypatch):
        """It would show the texts to more machines than this command was told to."""
        options = {"host": "0.0.0.0", "port": 8000}
        client = SimpleNamespace(get_serve_details=lambda: {"http_options": options})
        monkeypatch.setattr(cluster.serve, "start", lambda **_: None)
        monkeypatch.setattr(cluster, "_get_global_client", lambda: client)
        with pytest.raises(
            ValueError, match=r"--host=127.0.0.1: Ray Serve runs .* already, with host=0.0.0.0"
        ):
            cluster._start_serve(SimpleNamespace(host="127.0.0.1", port=8000))
        cluster._start_serve(SimpleNamespace(host="0.0.0.0", port=8000))

    def test_a_replica_that_does_not_start_gives_its_own_reason(self, cluster, monkeypatch):
        def deployment(status, message):
            return SimpleNamespace(status=status, message=message)

        traceback = "It failed 2 times.\nTraceback ...\n  File ...\na.b.IndexMismatch: another fingerprint"
        found = {"shard-0": deployment("HEALTHY", ""), "shard-1": deployment("DEPLOY_FAILED", traceback)}
        app = SimpleNamespace(status="DEPLOY_FAILED", message="Failed to update", deployments=found)
        applications = {cluster.APP: app}
        monkeypatch.setattr(cluster.serve, "status", lambda: SimpleNamespace(applications=applications))
        with pytest.raises(ValueError, match="^shard-1: a.b.IndexMismatch: another fingerprint$"):
            cluster._await_replicas(0.0)
