"""The tiny lab on one rank, on two, and on two nodes of a Ray cluster: the same losses.

One update a step, so that no row's mini-batch depends on how rows are shared out.
"""

import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

import pytest

from verl_credit.lab.build import build_lab
from verl_credit.run.files import EVENTS, METRICS, read_json_lines
from verl_credit.run.network import RAY

pytestmark = pytest.mark.e2e

TIMEOUT_S = 420
SETTINGS = [
    "lab.size=tiny",
    "trainer.total_training_steps=2",
    "trainer.val_before_train=false",
    "trainer.test_freq=-1",
    "trainer.save_freq=-1",
    "actor_rollout_ref.actor.ppo_mini_batch_size=16",
]
SAME = (
    "actor/pg_loss",
    "actor/grad_norm",
    "actor/entropy",
    "credit/gain/mean",
    "credit/outcome/em",
    "credit/advantage/token_std",
    "response_length/mean",
)


def train(lab, run_dir, *overrides, environment=None):
    command = [sys.executable, "-W", "ignore", "-m", "verl_credit.cli", "train", "--config-name", "lab"]
    done = subprocess.run(
        [*command, *SETTINGS, f"lab.dir={lab}", f"run_dir={run_dir}", *overrides],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=TIMEOUT_S,
        env={**os.environ, **(environment or {})},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    return read_json_lines(run_dir / METRICS)


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lab") / "tiny"
    build_lab(folder, world_seed=0, size="tiny", progress=lambda *_: None)
    return folder


@pytest.fixture(scope="module")
def one_rank(lab):
    return train(lab, lab.parent / "one")


# Ray asks everyone who joins or uses a cluster for its token.
TOKEN = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}


def assert_same(rows, expected):
    assert [row["step"] for row in rows] == [row["step"] for row in expected] == [1, 2]
    for ours, theirs in zip(rows, expected, strict=True):
        for name in SAME:
            assert ours[name] == pytest.approx(theirs[name], rel=2e-3, abs=2e-6), (ours["step"], name)


def test_two_ranks_have_the_losses_of_one(lab, one_rank):
    assert any(row["actor/grad_norm"] > 0 for row in one_rank)
    assert_same(train(lab, lab.parent / "two", "trainer.n_gpus_per_node=2"), one_rank)


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture
def cluster(tmp_path):
    """Two raylets on this machine that believe to be two; each says that it has a GPU (verl asks for one per rank)."""
    ray = [str(Path(sys.executable).with_name("ray")), "start", "--block", "--num-cpus=8", "--num-gpus=1"]
    ray += ["--object-store-memory=150000000", "--disable-usage-stats"]
    port, folder = free_port(), tempfile.mkdtemp(prefix="ray")  # a short path: sockets lie in it
    head = [*ray, "--head", f"--port={port}", "--include-dashboard=false", f"--temp-dir={folder}"]
    environment, nodes = {**os.environ, **TOKEN, "RAY_worker_niceness": "0"}, []
    environment.pop(RAY, None)  # with it nobody may join

    def start(command):
        with open(tmp_path / "nodes.log", "a") as log:
            nodes.append(
                subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True)
            )

    try:
        start(head)
        wait_for(port, nodes[0])
        start([*ray, f"--address=127.0.0.1:{port}"])
        yield f"127.0.0.1:{port}"
    finally:
        for node in reversed(nodes):
            os.killpg(node.pid, signal.SIGTERM)
        for node in nodes:
            node.wait(timeout=60)
        shutil.rmtree(folder, ignore_errors=True)


def wait_for(port, node):
    for _ in range(600):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        with suppress(subprocess.TimeoutExpired):
            node.wait(timeout=0.1)
            raise RuntimeError(f"Ray ended with code {node.returncode}")
    raise TimeoutError(f"no Ray on port {port}")


def test_two_nodes_have_the_losses_of_one_rank(lab, one_rank, cluster):
    rows = train(
        lab, lab.parent / "nodes", "trainer.nnodes=2", f"+ray_kwargs.ray_init.address='{cluster}'",
        "ray_kwargs.ray_init.num_cpus=null", "ray_kwargs.ray_init.num_gpus=null",
        "ray_kwargs.ray_init.object_store_memory=null", "ray_kwargs.ray_init.include_dashboard=null",
        environment=TOKEN,
    )  # fmt: skip
    assert_same(rows, one_rank)
    (network,) = [
        row["text"] for row in read_json_lines(lab.parent / "nodes" / EVENTS) if row["kind"] == "network"
    ]
    assert f"others can reach the nodes of the Ray cluster at {cluster}" in network
