"""A worker that the fork server makes cannot be told from one that its client's Python starts, and none outlives either."""

import json
import os
import resource
import select
import signal
import socket
import subprocess
import sys
import threading
from contextlib import suppress

import pytest
from omegaconf import OmegaConf

from verl_credit.errors import ConfigError
from verl_credit.host.process import fork_client, fork_imports, fork_server
from verl_credit.host.process.fork_workers import RUNTIME_ENV, SERVER, _environment, why_not
from verl_credit.records.run.files import EVENTS, read_json_lines

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the fork server needs Linux")

FACTS = """
import json, os, resource, signal, sys
mask = os.umask(0)
facts = {
    "words": sys.argv, "name": __name__, "main": sys.modules["__main__"].__file__, "first_path": sys.path[0],
    "paths": sys.path, "folder": os.getcwd(), "umask": mask, "environment": dict(os.environ), "input": sys.stdin.read(),
    "files": resource.getrlimit(resource.RLIMIT_NOFILE), "nice": os.nice(0),
    "blocked": sorted(map(int, signal.pthread_sigmask(signal.SIG_BLOCK, ()))),
    "open": sorted(int(name) for name in os.listdir("/proc/self/fd"))[:3],
}
print(json.dumps(facts))
print("to stderr", file=sys.stderr)
"""
WAITS = "import os\nprint(os.getpid(), flush=True)\nimport signal\nsignal.pause()"


class Served:
    """A fork server of `this`, whose print says that the server listens, and later `fractions`; and what its clients run."""

    def __init__(self, folder, **environment):
        self.folder, self.address = folder, str(folder / "socket")
        command = [sys.executable, "-m", SERVER, self.address, str(folder), "this", "fractions"]
        self.environment = {**os.environ, **environment}
        streams = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self.process = subprocess.Popen(command, env=self.environment, **streams)
        self.process.stdout.readline()
        self.clients: list[subprocess.Popen] = []

    def command(self, script, *words, forked=True):
        path = self.folder / "worker.py"
        path.write_text(script)
        client = ["-I", "-S", fork_client.__file__, self.address] if forked else []
        return [sys.executable, *client, str(path), *words]

    def start(self, script):
        """(the client, the id of its worker)."""
        client = subprocess.Popen(self.command(script), stdout=subprocess.PIPE, env=self.environment)
        self.clients.append(client)
        return client, int(client.stdout.readline())

    def lines(self):
        return [row["text"] for row in read_json_lines(self.folder / EVENTS)]

    def end(self):
        self.process.stdin.close()
        self.process.stdout.close()
        return self.process.wait(20)


@pytest.fixture
def served(tmp_path):
    one = Served(tmp_path)
    yield one
    for client in one.clients:
        client.kill()
        client.wait()
        client.stdout.close()
    if one.process.poll() is None:
        assert one.end() == 0


def gone(process_id):
    """Waits for the end of a process that may be nobody's child."""
    with suppress(ProcessLookupError):
        handle = os.pidfd_open(process_id)
        assert select.select([handle], [], [], 20)[0], "it is alive"
        os.close(handle)
    return True


def test_a_worker_is_what_python_would_start(served, tmp_path):
    (tmp_path / "elsewhere").mkdir()

    def facts(forked):
        def inherit():
            os.umask(0o027)
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
            resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 200), hard))
            signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
            os.nice(1)

        command = served.command(FACTS, "--a", "b c", forked=forked)
        environment = {**os.environ, "OF_THE_WORKER": "ä", "RAY_JOB": "7"}
        return subprocess.run(
            command, input="in", cwd=tmp_path / "elsewhere", env=environment, preexec_fn=inherit,
            capture_output=True, text=True, check=True,
        )  # fmt: skip

    forked, own = facts(True), facts(False)
    assert json.loads(forked.stdout) == json.loads(own.stdout)
    assert forked.stderr == own.stderr == "to stderr\n"
    assert json.loads(forked.stdout)["environment"]["OF_THE_WORKER"] == "ä"
    assert served.lines() == [fork_server.IMPORTED]  # it was forked, or there were a reason


@pytest.mark.parametrize(
    "script, code",
    [("raise SystemExit(7)", 7), ("import os; os._exit(9)", 9), ("1 / 0", 1), ("", 0), ("import os; os.abort()", -6),
     ("import os; os.kill(os.getpid(), 15)", -15), ("import os; os.kill(os.getpid(), 9)", -9)],
)  # fmt: skip
def test_the_client_ends_as_its_worker(served, script, code):
    ended = subprocess.run(served.command(script), env=served.environment, stderr=subprocess.DEVNULL)
    assert ended.returncode == code and served.lines() == [fork_server.IMPORTED]


def test_a_killed_client_takes_its_worker_along_and_no_other(served):
    (one, first), (other, second) = served.start(WAITS), served.start(WAITS)
    assert {one.pid, other.pid}.isdisjoint({first, second})
    one.kill()
    assert gone(first) and other.poll() is None
    os.kill(second, 0)
    os.kill(second, signal.SIGTERM)
    assert other.wait(20) == -signal.SIGTERM


@pytest.mark.parametrize("end", ["its input ends", "killed"])
def test_no_worker_outlives_the_server(served, end):
    client, worker = served.start(WAITS)
    served.process.kill() if end == "killed" else served.end()
    assert gone(worker) and client.wait(20) == -signal.SIGKILL
    served.process.wait(20)


def test_without_a_server_the_client_becomes_the_worker(served):
    served.end()
    client, worker = served.start(WAITS)
    assert worker == client.pid


@pytest.mark.parametrize("name", ["OMP_NUM_THREADS", "PYTHONHASHSEED", "TORCH_CPP_LOG_LEVEL"])
def test_a_worker_with_another_value_that_an_import_reads_starts_python_itself(served, name):
    other = {**os.environ, name: "11"}
    assert subprocess.run(served.command(""), env=other).returncode == 0
    assert subprocess.run(served.command(""), env=served.environment).returncode == 0
    reason = f"a worker imports verl itself: the fork server has another {name}"
    assert served.lines() == [reason, fork_server.IMPORTED]
    served.environment = other
    client, worker = served.start(WAITS)
    assert worker == client.pid and served.lines()[2:] == [reason]


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


def test_a_second_thread_is_a_reason_not_to_fork():
    assert (fork_imports.more_threads() == "") == (len(os.listdir("/proc/self/task")) == 1)
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait)
    thread.start()
    assert "threads" in fork_imports.more_threads()
    stop.set()
    thread.join()


def test_another_user_is_refused(monkeypatch):
    here, there = socket.socketpair()
    with here, there:
        assert fork_server.is_ours(here)
        monkeypatch.setattr(os, "getuid", lambda: 12345678)
        assert not fork_server.is_ours(here)


def test_garbage_is_refused_and_the_server_goes_on(served):
    for words in (b"", b"\n[1]\n", b'\n{"words": []}\n'):
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(served.address)
            client.sendall(words)
            client.shutdown(socket.SHUT_WR)
            assert client.recv(100) == b'{"starts": false}\n'
    assert subprocess.run(served.command("raise SystemExit(3)"), env=served.environment).returncode == 3


def settings(choice="auto", device="cpu", **runtime_env):
    config = {"fork_workers": choice, "trainer": {"device": device}}
    return OmegaConf.create(
        {**config, "ray_kwargs": {"ray_init": {"runtime_env": runtime_env, "address": "local"}}}
    )


def test_which_runs_have_one(monkeypatch):
    assert why_not(settings()) == why_not(settings(True)) == why_not(settings(True, "cuda")) == ""
    assert why_not(settings(False)) == "fork_workers=false"
    assert "for runs without a GPU" in why_not(settings(device="cuda"))
    assert f"{RUNTIME_ENV}.pip" in why_not(settings(pip=["a"]))
    with pytest.raises(ConfigError, match="fork_workers=true: auto or false: .*py_executable"):
        why_not(settings(True, py_executable="other"))
    joined = settings()
    joined.ray_kwargs.ray_init.address = "10.0.0.1:6379"
    assert "joins the cluster at 10.0.0.1:6379" in why_not(joined)


def test_the_server_has_the_folder_that_a_shell_would_write(tmp_path, monkeypatch):
    (tmp_path / "link").symlink_to(tmp_path)
    monkeypatch.chdir(tmp_path)
    for given, seen in (("/", tmp_path), ("/none", tmp_path), (tmp_path / "link", tmp_path / "link")):
        monkeypatch.setenv("PWD", str(given))
        shell = subprocess.run(["bash", "-c", "echo $PWD"], capture_output=True, text=True, check=True).stdout
        assert _environment()["PWD"] == str(seen) == shell.strip()
