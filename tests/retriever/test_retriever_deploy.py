"""`deploy` on two raylets: the answers of one server, also while a node is killed under load."""

import os
import re
import signal
import subprocess
import sys

import httpx
import numpy as np
import pytest

from kit.ray_cluster import TOKEN, RayCluster, free_port
from kit.search_load import SearchLoad, oracle
from verl_credit_retriever.launch import start_server

pytestmark = [pytest.mark.e2e, pytest.mark.nightly]

K = 5
QUERIES = [
    f"who is the mayor of town {town} born in river {river}" for town in range(50) for river in range(10)
]
LOST = {"ConnectError", "ReadError", "RemoteProtocolError"}  # the node had accepted the connection


def command(*arguments):
    """(exit code, stdout, stderr) of the retriever's command line."""
    done = subprocess.run(
        [sys.executable, "-m", "verl_credit_retriever.cli", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, **TOKEN, "OMP_NUM_THREADS": "1"},
    )
    return done.returncode, done.stdout, done.stderr


@pytest.fixture
def cluster(tmp_path):
    with RayCluster(tmp_path / "nodes.log", ["--num-cpus=8"]) as running:
        yield running


def ask(url, queries):
    body = {"queries": queries, "topk": K, "return_scores": True}
    answer = httpx.post(f"{url}/retrieve", json=body, timeout=60, trust_env=False)
    assert answer.status_code == 200, answer.text
    fingerprint = answer.headers["X-Index-Fingerprint"]
    return fingerprint, answer.json()["result"]


def test_a_killed_node_costs_connections_but_no_answer_is_wrong_or_short(folders, cluster):
    port = free_port()
    at = ["--index", folders / "index", "--encoder", folders / "encoder", "--address", cluster.address]
    at += ["--port", port, "--cache-entries", 0]
    code, said, problem = command("deploy", *at, "--shards", 2, "--replicas", 2, "--ready-seconds", 200)
    assert code == 0, problem
    assert "2 machine(s), at most 1 replica(s) of a shard on each" in said
    assert "shard 0 of 2 (rows 0 to 24)" in said and f"serving on http://127.0.0.1:{port}" in said
    url = f"http://127.0.0.1:{port}"

    with start_server(folders / "index", folders / "encoder", log_path=folders / "single.log") as single:
        fingerprint, expected = ask(single.url, QUERIES[::10])
    assert f"fingerprint {fingerprint}" in said
    found_by, found = ask(url, QUERIES[::10])
    assert found_by == fingerprint
    assert [[hit["document"] for hit in hits] for hits in found] == [
        [hit["document"] for hit in hits] for hits in expected
    ]
    scores, right = ([hit["score"] for hits in each for hit in hits] for each in (found, expected))
    np.testing.assert_allclose(scores, right, atol=1e-6)

    assert httpx.get(f"{url}/info").json()["fingerprint"] == fingerprint
    # Ray's proxy adds no routes of its own.
    assert "there is no GET '/retrieve/'" in httpx.get(f"{url}/retrieve/").json()["error"]
    too_many = httpx.post(f"{url}/retrieve", json={"queries": ["a"], "topk": 101})
    assert (too_many.status_code, too_many.json()) == (422, {"error": "topk: 101; at most 100"})
    assert httpx.get(f"{url}/readyz", headers={"Host": "other.example"}).status_code == 421

    exact = oracle(folders, QUERIES, K)
    with SearchLoad(url, QUERIES, exact, K, clients=3) as load:
        load.wait_for_answers(20)
        cluster.kill_last()
        load.wait_for_answers(40)
        # Now every shard has one replica. Without those of shard 1 there is no answer until another has started.
        for pid in re.findall(
            r"pid (\d+)", next(line for line in said.splitlines() if line.startswith("shard 1"))
        ):
            try:
                os.kill(int(pid), signal.SIGKILL)
            except ProcessLookupError:
                continue  # it was on the other node
        load.wait_for_answers(40)
    assert load.seen.keys() - LOST <= {"200", "503"}, (load.seen, load.bodies)

    assert [[hit["document"] for hit in hits] for hits in ask(url, QUERIES[::10])[1]] == [
        [hit["document"] for hit in hits] for hits in expected
    ]
    assert httpx.get(f"{url}/readyz").json() == {"status": "ready"}
    assert command("undeploy", "--address", cluster.address)[0] == 0
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{url}/livez")
