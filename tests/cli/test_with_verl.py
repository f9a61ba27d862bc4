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


def test_ray_has_minutes_to_start_on_a_busy_machine(environment):
    set_environment(load_config("lab"))
    assert int(environment["RAY_raylet_start_wait_time_s"]) >= 120  # Ray's own limit failed beside other runs


def test_what_the_user_set_goes_first(environment):
    environment["OMP_NUM_THREADS"] = "5"
    set_environment(load_config("lab", ["cpu_threads=3"]))
    assert environment["OMP_NUM_THREADS"] == "5"


def test_a_run_on_a_gpu_gets_no_number_of_threads(environment):
    set_environment(load_config("lab", ["trainer.device=cuda", "cpu_threads=3"]))
    assert "OMP_NUM_THREADS" not in environment and environment["VERL_USE_EXTERNAL_PLUGINS"] == "auto"


def test_hidden_gpus_are_no_concern_of_a_run_on_the_cpu(environment):
    environment["CUDA_VISIBLE_DEVICES"] = ""
    set_environment(load_config("lab"))
    assert "CUDA_VISIBLE_DEVICES" not in environment


def test_a_run_on_a_gpu_sees_the_gpus_that_its_user_names(environment):
    environment["CUDA_VISIBLE_DEVICES"] = "1"
    set_environment(load_config("lab", ["trainer.device=cuda"]))
    assert environment["CUDA_VISIBLE_DEVICES"] == "1"
