"""What a run puts into the environment of its processes."""

import os

import pytest

from kit.recipes import load_config
from verl_credit.cli.train.with_verl import set_environment


@pytest.fixture
def environment(monkeypatch):
    """Empty, and the process's own again afterwards."""
    found: dict[str, str] = {}
    monkeypatch.setattr(os, "environ", found)
    return found


def test_cpu_threads_reach_the_workers_and_the_engine(environment):
    config = load_config("real_math_cpu", ["cpu_threads=3"])
    set_environment(config)
    assert environment["OMP_NUM_THREADS"] == "3"
    assert config.actor_rollout_ref.rollout.engine_kwargs.hf.num_threads == 3
    assert load_config("lab").cpu_threads == 1


@pytest.mark.parametrize(
    "device, given, seen",
    [
        ("cpu", {}, {"RAY_raylet_start_wait_time_s": "120"}),  # Ray's own limit failed beside other runs
        ("cpu", {"OMP_NUM_THREADS": "5"}, {"OMP_NUM_THREADS": "5"}),
        ("cpu", {"CUDA_VISIBLE_DEVICES": ""}, {"CUDA_VISIBLE_DEVICES": None}),
        ("cuda", {"CUDA_VISIBLE_DEVICES": "1"}, {"CUDA_VISIBLE_DEVICES": "1", "OMP_NUM_THREADS": None}),
    ],
)
def test_what_the_user_set_stays_but_for_gpus_beside_the_cpu(environment, device, given, seen):
    environment |= given
    set_environment(load_config("lab", [f"trainer.device={device}", "cpu_threads=3"]))
    assert {name: environment.get(name) for name in seen} == seen
