"""What `deploy` refuses, in one line each. Marked slow because Ray Serve takes seconds to import."""

from types import SimpleNamespace

import pytest

from kit.ray_cluster import free_port
from verl_credit_retriever.cli import main


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


@pytest.mark.slow
class TestOnACluster:
    @pytest.fixture
    def cluster(self, monkeypatch):
        """The module, with a cluster of 8 CPUs on which nothing is deployed."""
        from verl_credit_retriever.deploy import cluster

        monkeypatch.setattr(cluster.serve, "status", lambda: SimpleNamespace(applications={}))
        monkeypatch.setattr(cluster.ray, "cluster_resources", lambda: {"CPU": 8.0})
        monkeypatch.setattr(cluster.ray, "nodes", lambda: [{"Alive": True}])
        return cluster

    def test_no_cluster(self, capsys):
        address = f"127.0.0.1:{free_port()}"
        assert main(["undeploy", f"--address={address}"]) == 2
        problem = capsys.readouterr().err
        assert problem.startswith(f"error: --address={address}: no Ray cluster") and problem.count("\n") == 1

    def test_more_processes_than_cpus(self, cluster):
        with pytest.raises(
            ValueError, match=r"\(shards \+ 1\) x replicas x threads = 9 CPUs; the cluster has 8"
        ):
            cluster._require_cpus(9)
        cluster._require_cpus(8)

    def test_what_is_deployed_is_not_deployed_over(self, cluster, monkeypatch):
        with pytest.raises(ValueError, match="nothing is deployed as 'verl-credit-retriever'"):
            cluster.undeploy()
        cluster._refuse_second()
        monkeypatch.setattr(
            cluster.serve, "status", lambda: SimpleNamespace(applications={cluster.APP: None})
        )
        with pytest.raises(ValueError, match="deployed on this cluster already"):
            cluster._refuse_second()

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

    def test_a_replica_that_does_not_start_gives_its_own_reason(self, cluster):
        def deployment(status, message):
            return SimpleNamespace(status=status, message=message)

        traceback = "It failed 2 times.\nTraceback ...\n  File ...\na.b.IndexMismatch: another fingerprint"
        found = {"shard-0": deployment("HEALTHY", ""), "shard-1": deployment("DEPLOY_FAILED", traceback)}
        failed = SimpleNamespace(message="Failed to update the deployments", deployments=found)
        assert cluster._reason(failed) == "shard-1: IndexMismatch: another fingerprint"
