"""A Ray that cannot be reached or started: one line and exit code 4, before anything heavy where that can be told."""

import signal
import socket
import sys
import traceback
from types import ModuleType, SimpleNamespace
from unittest.mock import patch

import pytest
from ray.exceptions import RayTaskError

from kit.lab_run import run
from kit.recipes import load_config
from verl_credit.cli.train import start as train_module
from verl_credit.cli.train.with_verl import check_with_verl
from verl_credit.errors import PreflightError, Terminated
from verl_credit.host.process import launch as module
from verl_credit.host.process.launch import RunFailed, launch
from verl_credit.recipe import compose
from verl_credit.recipe import recipe_files as files
from verl_credit.recipe.compose import compose_recipe

ADDRESS, LOGS = "ray_kwargs.ray_init.address", "/tmp/ray/session_of_this_run/logs"


def refused_port() -> str:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"127.0.0.1:{server.getsockname()[1]}"


@pytest.fixture
def alone(monkeypatch):
    """No cluster but the one that the environment names."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(
        "verl_credit.recipe.doctor.network.cluster_address",
        lambda environment: environment.get("RAY_ADDRESS", ""),
    )


@pytest.fixture
def nothing_heavy(monkeypatch):
    for name in ("_prepare_world", "_preflight", "_launch"):
        monkeypatch.setattr(train_module, name, lambda *_: pytest.fail("something heavy was started"))


@pytest.mark.slow
def test_train_refuses_an_address_where_nobody_answers(tmp_path, capsys, monkeypatch, alone, nothing_heavy):
    monkeypatch.setenv("RAY_ADDRESS", refused_port())
    code, lines = run(capsys, tmp_path)
    assert code == 4 and len(lines) == 1
    assert "ray: RAY_ADDRESS says 127.0.0.1:" in lines[0] and "nobody answers there" in lines[0]


def test_a_verl_that_is_not_there_is_told_in_one_line(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(compose, "compose_recipe", compose_recipe)  # not from the cache of the tests
    monkeypatch.setattr(files.importlib.util, "find_spec", lambda name: None)
    files._folder_of.cache_clear()
    code, lines = run(capsys, tmp_path)
    files._folder_of.cache_clear()
    assert code == 4 and len(lines) == 1
    assert "is not installed: pip install 'verl-credit[verl]'" in lines[0]


def test_a_verl_that_starts_half_way_is_told_in_one_line(monkeypatch):
    class Refusing(ModuleType):
        def __getattr__(self, name):
            raise ValueError("Unknown platform 'nonsense'.\nRegistered: ...")

    monkeypatch.setitem(sys.modules, "verl_credit.host.process.launch", Refusing("launch"))
    monkeypatch.setenv("VERL_USE_MODELSCOPE", "true")
    monkeypatch.setenv("VERL_CREDIT_RETRIEVER_TOKEN", "a-secret")
    with pytest.raises(PreflightError, match="ValueError: Unknown platform 'nonsense'") as caught:
        check_with_verl("verl", None)
    assert "VERL_USE_MODELSCOPE=true" in str(caught.value) and "a-secret" not in str(caught.value)


@pytest.fixture
def ending(monkeypatch, tmp_path):
    """launch() with a run that ends as told, in a home of its own."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setenv("HOME", str(tmp_path))

    def end(error, *overrides, up=False, node="127.0.0.1", run_ppo=None, shutdown=lambda: None):
        def ends(config, task_runner_class):
            raise error

        monkeypatch.setattr(module, "run_ppo", run_ppo or ends)
        fake = SimpleNamespace(is_initialized=lambda: up, shutdown=shutdown)
        fake.util = SimpleNamespace(get_node_ip_address=lambda: node)
        own = SimpleNamespace(get_logs_dir_path=lambda: LOGS)
        fake._private = SimpleNamespace(worker=SimpleNamespace(_global_node=own))
        monkeypatch.setattr(module, "ray", fake)
        launch(load_config("lab", list(overrides)))

    yield end
    signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize("given", [None, "70000"])
def test_rays_head_remembers_few_tasks_unless_the_environment_says_otherwise(ending, given):
    name, kept, seen = *module.KEPT_TASKS, []
    with patch.dict(module.os.environ, {} if given is None else {name: given}):
        if given is None:
            module.os.environ.pop(name, None)
        ending(None, run_ppo=lambda config, task_runner_class: seen.append(module.os.environ[name]))
    assert seen == [given or kept] and int(kept) <= 10_000


def test_what_ray_init_raises_is_one_line(ending):
    with pytest.raises(PreflightError, match=r"ray_kwargs.ray_init.num_cpus=16") as caught:
        ending(ValueError("When connecting to a cluster,\nnum_cpus and num_gpus must not be provided."))
    assert "\n" not in str(caught.value)


def test_a_ray_that_is_slow_to_start_is_started_once_more(ending, capsys):
    """What Ray 2.60 raises, as it raises it."""
    slow, tried = Exception("The current node timed out during startup. This could happen because"), []

    def run_ppo(config, task_runner_class):
        tried.append(task_runner_class)
        if len(tried) in fails:
            raise slow

    fails = (1,)
    ending(None, run_ppo=run_ppo)
    assert len(tried) == 2 and "started once more" in capsys.readouterr().out
    tried, fails = [], (1, 2)
    with pytest.raises(PreflightError, match="Exception: The current node timed out"):
        ending(None, run_ppo=run_ppo)
    assert len(tried) == 2


def test_a_run_whose_own_error_speaks_of_a_start_is_not_run_again_and_keeps_its_error(ending):
    tried = []

    def run_ppo(config, task_runner_class):
        tried.append(1)
        raise RuntimeError("a server timed out during startup")

    with pytest.raises(RuntimeError, match="a server timed out"):
        ending(None, run_ppo=run_ppo, up=True)
    assert tried == [1]


def test_ray_gives_up_a_cluster_that_is_gone(ending):
    address = refused_port()
    with pytest.raises(PreflightError, match=f"no Ray answers at {address}"):
        ending(SystemExit(15), f"+{ADDRESS}='{address}'")


@pytest.mark.parametrize("options", [{}, {"runtime_env": {}}])
def test_sigterm_is_ours_again_once_ray_has_started(ending, monkeypatch, options):
    """Ray's own handlers would abort the process, and nobody would write down how the run ended."""

    class Runner:
        remote = options = classmethod(lambda cls, **_: cls)

    def run_ppo(config, task_runner_class):
        signal.signal(signal.SIGTERM, lambda *_: pytest.fail("Ray's handler"))  # as ray.init does
        (task_runner_class.options(**options) if options else task_runner_class).remote()
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(module, "CreditTaskRunner", Runner)
    with pytest.raises(Terminated), train_module.terminate_as_interrupt():
        ending(None, run_ppo=run_ppo)


def test_ray_s_token_is_the_user_s_alone(ending, monkeypatch, tmp_path):
    token = tmp_path / ".ray" / "auth_token"

    class Runner:
        remote = classmethod(lambda cls: None)

    def run_ppo(config, task_runner_class):
        token.parent.mkdir()
        token.write_text("secret")  # as ray.init does
        token.chmod(0o644)
        task_runner_class.remote()

    monkeypatch.setattr(module, "CreditTaskRunner", Runner)
    ending(None, run_ppo=run_ppo)
    assert token.stat().st_mode & 0o777 == 0o600 and token.read_text() == "secret"


def test_sigterm_is_an_interruption_while_ray_starts_and_after(ending):
    for up in (False, True):
        with pytest.raises(KeyboardInterrupt):
            ending(SystemExit(int(signal.SIGTERM)), up=up)
    with pytest.raises(RunFailed, match="exit code 1"):
        ending(SystemExit(1), up=True)


def test_a_failed_run_shows_the_last_frames_and_the_logs_of_its_own_ray(ending):
    """The trainer's error as the driver gets it: of the cause's class, with the worker's traceback as its text."""

    def version(tag):
        return int(tag)

    def step(depth):
        return step(depth - 1) if depth else version(None)

    try:
        step(6)
    except TypeError as error:
        cause, text = error, traceback.format_exc()
    raised = RayTaskError("run", text, cause, pid=1, ip="127.0.0.1").as_instanceof_cause()
    with pytest.raises(RunFailed, match=r"^TypeError: int\(\) argument") as caught:
        ending(raised, up=True)
    lines = str(caught.value).splitlines()
    assert sum("File" in line for line in lines) == module.FRAMES and "return int(tag)" in "".join(lines[-3:])
    assert lines[-1] == f"worker logs: {LOGS}" and "session_latest" not in str(caught.value)


def test_a_second_sigterm_does_not_end_the_shutdown(ending):
    """The first came while Ray started, so that its handler got it."""

    def run_ppo(config, task_runner_class):
        signal.signal(signal.SIGTERM, lambda number, _: sys.exit(number))  # as ray.init does
        signal.raise_signal(signal.SIGTERM)

    closed = []
    with pytest.raises(Terminated), train_module.terminate_as_interrupt():
        ending(None, run_ppo=run_ppo, shutdown=lambda: closed.append(signal.raise_signal(signal.SIGTERM)))
    assert closed == [None]


def test_ray_off_loopback_is_refused_before_it_starts(ending):
    with pytest.raises(PreflightError, match="192.0.2.7.* loopback"):
        ending(ValueError("started"), node="192.0.2.7")
