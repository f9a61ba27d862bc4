"""The CPU platform and the registration of the engine, without Ray."""

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("verl")

from verl_credit.host.cpu import platform as cpu
from verl_credit.host.registry import register_parts


def test_register_twice_changes_nothing():
    from verl.plugin.platform.platform_manager import PlatformRegistry
    from verl.workers.rollout.base import _ROLLOUT_REGISTRY

    register_parts()
    platform, adapters = PlatformRegistry.get("cpu"), dict(_ROLLOUT_REGISTRY)
    register_parts()
    assert PlatformRegistry.get("cpu") is platform
    assert dict(_ROLLOUT_REGISTRY) == adapters


def test_the_rollout_engine_resolves():
    from verl.workers.rollout.base import _ROLLOUT_REGISTRY, get_rollout_class
    from verl.workers.rollout.replica import get_rollout_replica_class

    register_parts()
    assert get_rollout_replica_class("hf").__name__ == "HFReplica"
    assert get_rollout_class("hf", "async").__module__ == "verl_credit.host.hf_rollout.sync"
    assert (
        _ROLLOUT_REGISTRY["vllm", "async"] == "verl_credit.host.vllm_rollout.sync.ServerAdapter"
    )  # needs vLLM


def test_the_platform_is_never_detected_but_can_be_named(monkeypatch):
    from verl.plugin.platform import platform_manager

    register_parts()
    monkeypatch.delenv("VERL_PLATFORM", raising=False)
    assert platform_manager._detect_platform_name() != "cpu"
    monkeypatch.setenv("VERL_PLATFORM", "cpu")
    platform = platform_manager._create_platform(platform_manager._detect_platform_name())
    assert platform.device_name == "cpu" and platform.is_available() is True


def test_tensors_can_be_sent_to_the_current_device():
    from verl.plugin.platform.platform_manager import PlatformRegistry

    register_parts()
    platform = PlatformRegistry.get("cpu")()
    assert torch.ones(2).to(platform.current_device()).device.type == "cpu"
    assert platform.ray_resource_options(0.5) == {"num_gpus": 0.5}
    assert platform.communication_backend_name() == "gloo"
    with platform.nvtx_range("anything"):
        pass


def test_the_device_module_answers_what_verl_asks():
    module = cpu.device_module()
    free, total = module.mem_get_info()
    assert 0 < free <= total
    assert 0 < module.memory_allocated() <= module.max_memory_allocated() < total
    assert 0 < module.memory_reserved() <= module.max_memory_reserved()
    assert module.get_device_name() == "CPU"
    assert module.get_device_properties(0).total_memory == total
    assert module.is_available() is False  # no accelerator's memory to clean up
    for name in ("empty_cache", "synchronize", "ipc_collect", "reset_peak_memory_stats"):
        assert getattr(module, name)() is None
    state = module.get_rng_state()
    first = torch.rand(3)
    module.set_rng_state(state)
    assert torch.equal(first, torch.rand(3))
    cpu.PlatformCPU().manual_seed_all(7)
    first = torch.rand(3)
    module.manual_seed(7)
    assert torch.equal(first, torch.rand(3))


@pytest.mark.parametrize("system, bytes_a_unit", [("Linux", 1024), ("Darwin", 1)])
def test_the_peak_is_told_in_bytes(system, bytes_a_unit, monkeypatch):
    """The kernel counts in KiB on Linux and in bytes on macOS."""
    import resource

    peak = 1 << 50  # more than this process has, in either unit
    monkeypatch.setattr(cpu.platform, "system", lambda: system)
    monkeypatch.setattr(resource, "getrusage", lambda who: SimpleNamespace(ru_maxrss=peak))
    assert cpu.device_module().max_memory_allocated() == peak * bytes_a_unit


@pytest.mark.parametrize("missing", ["RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"])
def test_a_process_that_is_no_rank_makes_no_group(monkeypatch, missing):
    environment = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv(missing)
    assert cpu.PlatformCPU().communication_backend_name() == "gloo"
    assert not torch.distributed.is_initialized()


WORKER = """
import os, socket
import verl
import verl_credit.host.cpu.platform
from verl.utils.distributed import initialize_global_process_group_ray
with socket.socket() as probe:
    probe.bind(("127.0.0.1", 0))
    os.environ["MASTER_PORT"] = str(probe.getsockname()[1])
initialize_global_process_group_ray(timeout_second=None)
import torch.distributed
from verl.workers.engine import EngineRegistry
assert "gloo" in torch.distributed.get_backend(), torch.distributed.get_backend()
x = torch.ones(1)
torch.distributed.all_reduce(x)
print("ENGINE", EngineRegistry.get_engine_cls("language_model", "fsdp2").__name__)
import psutil
sockets = [c for c in psutil.Process().net_connections("tcp") if c.status == psutil.CONN_LISTEN]
print("LISTENS", sorted({c.laddr.ip for c in sockets}), int(os.environ["MASTER_PORT"]) in {c.laddr.port for c in sockets})
"""


@pytest.mark.slow
def test_a_training_worker_gets_its_group_and_its_engine_on_loopback():
    environment = {**os.environ, "VERL_PLATFORM": "cpu", "RANK": "0", "WORLD_SIZE": "1"}
    environment |= {"MASTER_ADDR": "127.0.0.1", "VERL_USE_EXTERNAL_PLUGINS": "none", "OMP_NUM_THREADS": "1"}
    environment |= {"DIST_INIT_METHOD": "loopback://"}
    done = subprocess.run([sys.executable, "-c", WORKER], env=environment, capture_output=True, text=True)
    assert "ENGINE CPUFSDPEngineWithLMHead" in done.stdout, done.stderr[-2000:]
    assert "LISTENS ['127.0.0.1'] True" in done.stdout, done.stdout
