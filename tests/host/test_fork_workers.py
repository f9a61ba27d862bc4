"""Which runs and imports have a fork server, what its forks draw, and what `train` says when it ends."""

import json
import os
import queue
import random
import subprocess
import sys
import tempfile
import threading

import pytest
from omegaconf import OmegaConf

from verl_credit.errors import ConfigError
from verl_credit.host.process import fork_imports, fork_workers
from verl_credit.host.process.fork_workers import RUNTIME_ENV, _environment, why_not

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the fork server needs Linux")

DRAWN = """
import json, os, random, threading
from verl_credit.host.process import fork_imports
from verl_credit.host.process.fork_workers import EARLY, LATE

imports = fork_imports.Imports(list(EARLY), list(LATE))
assert (why := imports.why_not(imports.environment)) == "", why
import datasets, numpy, ray, torch
from verl_credit.turns.signals import own

def draw():
    ids = [kind.from_random() for kind in (ray.NodeID, ray.WorkerID, ray.UniqueID, ray.ObjectRef)]
    ids.append(ray.PlacementGroupID.of(ray.JobID.from_int(1)))
    own_generators = [random, own._JITTER, datasets.fingerprint.fingerprint_rng, numpy.random]
    drawn.extend([*(one.hex() for one in ids), *(one.random() for one in own_generators), torch.rand(1).item()])

for _ in range(2):
    drawn = []
    if os.fork() == 0:
        imports.move_to(imports.environment)
        draw()
        thread = threading.Thread(target=draw)
        thread.start()
        thread.join()
        print(json.dumps(drawn), flush=True)
        os._exit(0)
    os.wait()
"""


def test_the_variables_that_imports_read_are_known(monkeypatch):
    monkeypatch.setenv("READ_BY_INDEX", "1")
    with fork_imports.variables_read() as names:
        os.environ["READ_BY_INDEX"], os.getenv("READ_BY_GETENV"), os.environ.get("READ_BY_GET")
        "READ_BY_IN" in os.environ  # noqa: B015
        list(os.environ.items()), os.environ.copy()  # no single variable
    assert names == {"READ_BY_INDEX", "READ_BY_GETENV", "READ_BY_GET", "READ_BY_IN"}
    os.environ.get("AFTERWARDS")
    assert "AFTERWARDS" not in names
    assert fork_imports.differing(
        {"A": "1", "B": "1", "C": "1"}, {"A": "1", "C": "2", "D": "1"}, {"A", "B"}
    ) == ["B"]


def test_generators_without_a_seed_are_known():
    with fork_imports.unseeded_generators() as made:
        random.Random(7), random.Random(x=7), random.SystemRandom()
        first, second = random.Random(), random.Random(None)
    random.Random()
    assert made == [first, second]


def test_a_second_thread_is_a_reason_not_to_fork():
    assert (fork_imports.more_threads() == "") == (len(os.listdir("/proc/self/task")) == 1)
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait)
    thread.start()
    assert "threads" in fork_imports.more_threads()
    stop.set()
    thread.join()


@pytest.mark.slow
def test_two_forks_of_what_a_run_imports_draw_different_numbers():
    command, environment = (
        [sys.executable, "-W", "ignore", "-c", DRAWN],
        {**os.environ, "VERL_PLATFORM": "cpu"},
    )
    ended = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    first, second = map(json.loads, ended.stdout.splitlines()[-2:])
    assert len({*first, *second}) == len(first) + len(second) == 40


@pytest.mark.slow
@pytest.mark.parametrize(
    "modules, why", [(["acts"], "started Ray's random generator"), (["ray.actor", "acts"], "")]
)
def test_an_import_that_starts_rays_random_generator_is_a_reason(tmp_path, modules, why):
    (tmp_path / "acts.py").write_text("import ray\n@ray.remote\nclass Acts: ...")
    script = f"""
from verl_credit.host.process.fork_imports import Imports
imports = Imports([], {modules})
print(imports.why_not(imports.environment))
"""
    path = os.pathsep.join([str(tmp_path), os.environ["PYTHONPATH"]])
    command = [sys.executable, "-c", script]
    ended = subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True)
    said = ended.stdout.strip()
    assert ended.returncode == 0 and why in said and bool(said) == bool(why), (said, ended.stderr)


@pytest.fixture
def recorded(monkeypatch):
    rows = queue.Queue()
    monkeypatch.setattr(fork_workers.events, "record", lambda *row: rows.put(row))
    return rows


def test_the_early_end_of_the_server_is_recorded_at_once(tmp_path, monkeypatch, recorded):
    monkeypatch.setattr(fork_workers, "EARLY", ("no_such_module",))
    with fork_workers.fork_server(settings(run_dir=str(tmp_path))):
        assert "ended early, with 1: ModuleNotFoundError: No module" in recorded.get(timeout=20)[-1]
    assert recorded.empty()


def test_the_server_needs_no_name_in_a_folder(tmp_path, monkeypatch, recorded):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(fork_workers, "EARLY", ("this",))
    with fork_workers.fork_server(settings(run_dir=str(tmp_path))) as command:
        assert list(tmp_path.iterdir()) == []
        assert "verl-credit-" in command
    assert recorded.empty()


def settings(choice="auto", device="cpu", run_dir="", **runtime_env):
    config = {"fork_workers": choice, "trainer": {"device": device}, "run_dir": run_dir}
    return OmegaConf.create(
        {**config, "ray_kwargs": {"ray_init": {"runtime_env": runtime_env, "address": "local"}}}
    )


def test_which_runs_have_one(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert why_not(settings()) == why_not(settings(True)) == why_not(settings(True, "cuda")) == ""
    assert why_not(settings(False)) == "fork_workers=false"
    assert "for runs without a GPU" in why_not(settings(device="cuda"))
    assert f"{RUNTIME_ENV}.pip" in why_not(settings(pip=["a"]))
    with pytest.raises(ConfigError, match="fork_workers=true: auto or false: .*py_executable"):
        why_not(settings(True, py_executable="other"))
    assert f"{RUNTIME_ENV}._nsight" in why_not(settings(_nsight="default"))
    isolated = settings()
    isolated.ray_kwargs.ray_init.enable_resource_isolation = True
    assert "enable_resource_isolation=true" in why_not(isolated)
    joined = settings()
    joined.ray_kwargs.ray_init.address = "10.0.0.1:6379"
    assert "joins the cluster at 10.0.0.1:6379" in why_not(joined)
    monkeypatch.delenv("OMP_NUM_THREADS")
    with pytest.raises(ConfigError, match="OMP_NUM_THREADS is not set"):
        why_not(settings(True, "cuda"))


def test_the_server_has_the_folder_that_a_shell_would_write(tmp_path, monkeypatch):
    (tmp_path / "link").symlink_to(tmp_path)
    monkeypatch.chdir(tmp_path)
    for given, seen in (("/", tmp_path), ("/none", tmp_path), (tmp_path / "link", tmp_path / "link")):
        monkeypatch.setenv("PWD", str(given))
        shell = subprocess.run(["bash", "-c", "echo $PWD"], capture_output=True, text=True, check=True).stdout
        assert _environment()["PWD"] == str(seen) == shell.strip()
