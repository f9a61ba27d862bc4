"""`deploy` on two raylets: the answers of one server, also while a node is killed under load."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager

import httpx
import numpy as np
import pytest

from kit.ray_cluster import TOKEN, RayCluster, free_port
from verl_credit_retriever.check import check_servers
from verl_credit_retriever.encoder import SentenceEncoder
from verl_credit_retriever.index.search import SearchIndex
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


@contextmanager
def load_on(url, folders):
    """Eight clients that ask until the block ends; every answer that they get is right. The value waits for so many more."""
    index, reports, ended = SearchIndex.load(folders / "index", backend="exact"), [], threading.Event()
    encoder = SentenceEncoder.for_index(folders / "encoder", index.manifest)

    def ask_on():
        while not ended.is_set():
            reports.append(check_servers([url], index, encoder, QUERIES[len(reports) % 10 :: 10], ks=(K,)))

    def answered():
        return sum(report["servers"][url]["answered"] for report in reports)

    def wait_for_answers(number):
        wanted, deadline = answered() + number, time.monotonic() + 120
        while answered() < wanted:
            assert time.monotonic() < deadline and clients.is_alive(), reports[-1:]
            time.sleep(0.1)

    clients = threading.Thread(target=ask_on, daemon=True)
    clients.start()
    yield wait_for_answers
    ended.set()
    clients.join(180)
    for report in reports:
        served = report["servers"][url]
        assert served["statuses"].keys() - LOST <= {"200", "503"}, report
        assert served["recall"][str(K)] * report["queries"] == pytest.approx(served["answered"]), report
        assert not [said for said in report["problems"] if "malformed" in said or "wrong scores" in said]


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
    other = httpx.get(f"{url}/retrieve/")
    assert other.status_code == 404 and other.json().keys() == {"error"}
    too_many = httpx.post(f"{url}/retrieve", json={"queries": ["a"], "topk": 101})
    assert (too_many.status_code, too_many.json()) == (422, {"error": "topk: 101; at most 100"})
    assert httpx.get(f"{url}/readyz", headers={"Host": "other.example"}).status_code == 421

    with load_on(url, folders) as wait_for_answers:
        wait_for_answers(20)
        cluster.kill_last()
        wait_for_answers(40)
        # Now every shard has one replica. Without those of shard 1 there is no answer until another has started.
        for pid in re.findall(
            r"pid (\d+)", next(line for line in said.splitlines() if line.startswith("shard 1"))
        ):
            try:
                os.kill(int(pid), signal.SIGKILL)
            except ProcessLookupError:
                continue  # it was on the other node
        wait_for_answers(40)

    assert [[hit["document"] for hit in hits] for hits in ask(url, QUERIES[::10])[1]] == [
        [hit["document"] for hit in hits] for hits in expected
    ]
    assert httpx.get(f"{url}/readyz").json() == {"status": "ready"}
    assert command("undeploy", "--address", cluster.address)[0] == 0
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{url}/livez")
