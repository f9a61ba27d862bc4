"""A run with a Ray of its own listens on loopback alone; what is set against that, and what a cluster opens, is said."""

import os
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from ipaddress import ip_address

import psutil
import pytest
from omegaconf import OmegaConf

from verl_credit.host.engine import process_group
from verl_credit.recipe.doctor import network
from verl_credit.recipe.doctor.network import is_loopback, loopback_settings, network_lines, why_not_loopback


@pytest.fixture(autouse=True)
def no_cluster_here(monkeypatch):
    monkeypatch.setattr(
        "verl_credit.recipe.doctor.network.cluster_address",
        lambda environment: environment.get("RAY_ADDRESS", ""),
    )


def recipe(engine="hf", **init):
    rollout = {"rollout": {"name": engine}}
    return OmegaConf.create({"actor_rollout_ref": rollout, "ray_kwargs": {"ray_init": init}})


OWN = {network.RAY: "0"}
CLUSTER = {**OWN, "RAY_ADDRESS": "192.0.2.1:6379"}


@pytest.mark.slow
def test_ray_takes_loopback_for_this_machine_when_told_before_its_import():
    """The command's order: our module, which must not import Ray, the switch, and then everything else."""
    script = (
        "import os, sys, verl_credit.cli; from verl_credit.recipe.doctor.network import ray_on_loopback\n"
        "assert 'ray' not in sys.modules; ray_on_loopback(os.environ)\n"
        "import ray; print(ray.util.get_node_ip_address())"
    )
    environment = {name: value for name, value in os.environ.items() if name != network.RAY}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)
    assert is_loopback(done.stdout.strip()), (done.stdout, done.stderr)


def test_a_run_with_a_ray_of_its_own_keeps_its_workers_on_loopback_without_a_word():
    told = loopback_settings(OWN, recipe())
    assert told["DIST_INIT_METHOD"] == "loopback://"
    of_interface = psutil.net_if_addrs()[told["GLOO_SOCKET_IFNAME"]]
    assert any(address.address == "127.0.0.1" for address in of_interface)
    assert told["NCCL_SOCKET_IFNAME"] == "=" + told["GLOO_SOCKET_IFNAME"]
    assert network_lines(OWN, recipe()) == []
    assert network_lines({**OWN, "NCCL_SOCKET_IFNAME": told["GLOO_SOCKET_IFNAME"]}, recipe()) == []


@pytest.mark.parametrize(
    ("environment", "init", "said"),
    [
        ({network.RAY: "1"}, {}, "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER=1"),
        ({"GLOO_SOCKET_IFNAME": "eth7"}, {}, "GLOO_SOCKET_IFNAME=eth7"),
        ({"NCCL_SOCKET_IFNAME": "eth7"}, {}, "NCCL_SOCKET_IFNAME=eth7"),
        ({"DIST_INIT_METHOD": "tcp://192.0.2.1:1"}, {}, "DIST_INIT_METHOD=tcp://192.0.2.1:1"),
    ],
)
def test_what_is_set_against_it_stands_and_is_said(environment, init, said):
    environment, config = {**OWN, **environment}, recipe(**init)
    (line,) = network_lines(environment, config)
    assert line.startswith(f"network: {said}: this opens ports beyond loopback")
    told = loopback_settings(environment, config)
    assert {name: told[name] for name in told if name in environment}.items() <= environment.items()


def test_the_engine_that_is_not_ours_is_said():
    (line,) = network_lines(OWN, recipe("vllm"))
    assert "rollout.name=vllm" in line and "on all interfaces, without credentials" in line


@pytest.mark.parametrize(
    ("environment", "init"),
    [(CLUSTER, {}), (OWN, {"address": "192.0.2.1:6379"}), (CLUSTER, {"address": "auto"})],
)
def test_a_cluster_is_left_as_it_is_and_its_ports_are_said(environment, init):
    config = recipe("vllm", **init)
    assert loopback_settings(environment, config) == {}
    (line,) = network_lines(environment, config)
    for what in (
        "the Ray cluster at 192.0.2.1:6379",
        "token",
        "TransferQueue",
        "torch's store",
        "gloo and NCCL",
    ):
        assert what in line
    assert why_not_loopback(environment, config, "192.0.2.7") == ""


def test_a_ray_that_would_not_listen_on_loopback_is_named():
    assert why_not_loopback(OWN, recipe(), "127.0.0.1") == ""
    assert "Ray would listen on 192.0.2.7" in why_not_loopback(OWN, recipe(), "192.0.2.7")
    assert why_not_loopback({network.RAY: "True"}, recipe(), "192.0.2.7") == ""  # asked for


def test_torch_s_store_listens_on_loopback_alone(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    monkeypatch.setenv("MASTER_PORT", str(port))
    with ThreadPoolExecutor(1) as other:
        first = other.submit(next, process_group.meet("loopback:?rank=0&world_size=2"))
        store, rank, world_size = next(process_group.meet("loopback:?rank=1&world_size=2"))
        assert (rank, world_size) == (1, 2) and first.result()[1:] == (0, 2)
    first.result()[0].set("said", "heard")
    assert store.get("said") == b"heard"
    sockets = [c.laddr for c in psutil.Process().net_connections("tcp") if c.status == psutil.CONN_LISTEN]
    assert [ip_address(s.ip).is_loopback for s in sockets if s.port == port] == [True]


def test_the_store_needs_verl_s_port(monkeypatch):
    monkeypatch.delenv("MASTER_PORT", raising=False)
    with pytest.raises(ValueError, match="MASTER_PORT"):
        next(process_group.meet("loopback:?rank=0&world_size=1"))
