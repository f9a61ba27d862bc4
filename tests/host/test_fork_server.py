"""A worker that the fork server makes cannot be told from one that its client's Python starts, and none outlives either."""

import json
import os
import resource
import signal
import socket
import struct
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest

from kit.fork_served import WAITS, gone, serving
from verl_credit.host.process import fork_client, fork_server
from verl_credit.records.run.files import EVENTS

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the fork server needs Linux")

FACTS = """
import json, os, resource, signal, sys
mask = os.umask(0)
facts = {
    "words": sys.argv, "name": __name__, "main": sys.modules["__main__"].__file__, "first_path": sys.path[0],
    "paths": sys.path, "folder": os.getcwd(), "umask": mask, "environment": dict(os.environ), "input": sys.stdin.read(),
    "files": resource.getrlimit(resource.RLIMIT_NOFILE), "nice": os.nice(0),
    "blocked": sorted(map(int, signal.pthread_sigmask(signal.SIG_BLOCK, ()))),
    "oom_score": open("/proc/self/oom_score_adj").read(),
    "open": sorted(os.listdir("/proc/self/fd")), "wakes": signal.set_wakeup_fd(-1),
    "handlers": [str(signal.getsignal(one)) for one in sorted(signal.valid_signals())],
}
print(json.dumps(facts))
print("to stderr", file=sys.stderr)
"""


@pytest.fixture
def served(tmp_path):
    with serving(tmp_path) as one:
        yield one


@pytest.mark.parametrize("settings", [{}, {"PYTHONSAFEPATH": "1"}])
def test_a_worker_is_what_python_would_start(tmp_path, settings):
    (tmp_path / "elsewhere").mkdir()

    def facts(forked):
        def inherit():
            os.umask(0o027)
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
            resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 200), hard))
            signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
            os.nice(1)
            Path("/proc/self/oom_score_adj").write_text("300")

        command = served.command(FACTS, "--a", "b c", forked=forked)
        environment = {**served.environment, "OF_THE_WORKER": "ä", "RAY_JOB": "7"}
        return subprocess.run(
            command, input="in", cwd=tmp_path / "elsewhere", env=environment, preexec_fn=inherit,
            capture_output=True, text=True, check=True,
        )  # fmt: skip

    with serving(tmp_path, **settings) as served:
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
    said = subprocess.run(served.command(""), capture_output=True, text=True).stderr
    assert "this worker makes its own imports, without the fork server: " in said


@pytest.mark.parametrize("name", ["OMP_NUM_THREADS", "PYTHONHASHSEED", "TORCH_CPP_LOG_LEVEL", "LC_TIME"])
def test_a_worker_with_another_value_that_an_import_reads_starts_python_itself(served, name):
    other = {**os.environ, name: "11"}
    assert subprocess.run(served.command(""), env=other).returncode == 0
    assert subprocess.run(served.command(""), env=served.environment).returncode == 0
    reason = f"a worker makes its own imports: the fork server has another {name}"
    assert served.lines() == [reason, fork_server.IMPORTED]
    served.environment = other
    client, worker = served.start(WAITS)
    assert worker == client.pid and served.lines()[2:] == [reason]


def test_another_user_is_refused(monkeypatch):
    here, there = socket.socketpair()
    with here, there:
        assert fork_server.is_ours(here)
        monkeypatch.setattr(os, "getuid", lambda: 2**31 + 5)
        assert not fork_server.is_ours(here)
        assert fork_server.is_ours(Mock(getsockopt=lambda *_: struct.pack("iII", 7, 2**31 + 5, 8)))
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("\0verl-credit-test-of-another-user")
        server.listen()
        with pytest.raises(PermissionError):
            fork_client.ask("verl-credit-test-of-another-user", [])


def test_garbage_is_refused_and_the_server_goes_on(served):
    assert subprocess.run(served.command(""), env=served.environment).returncode == 0
    files = f"/proc/{served.process.pid}/fd"
    before = len(os.listdir(files))
    with_one_file = json.dumps({"words": ["/none"], **fork_client.state_of_process()}).encode()
    for words in (b"\n", b"\n[1]\n", b'\n{"words": []}\n', b"\n" + with_one_file + b"\n"):
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(f"\0{served.name}")
            socket.send_fds(client, [words], [1])
            client.shutdown(socket.SHUT_WR)
            assert client.recv(100) == b'{"starts": false}\n'
    assert len(os.listdir(files)) <= before + 1  # the last connection may still be open
    assert subprocess.run(served.command("raise SystemExit(3)"), env=served.environment).returncode == 3
    assert "its standard files did not arrive" in served.lines()[-1]


def test_a_fork_that_fails_is_a_reason_and_its_client_becomes_the_worker(served):
    with socket.socket(socket.AF_UNIX) as client:
        served.ask(client, folder="/none")
        assert client.recv(100) == b'{"starts": false}\n'
    assert subprocess.run(served.command("raise SystemExit(3)"), env=served.environment).returncode == 3
    assert "a worker makes its own imports: the fork failed: FileNotFoundError" in served.lines()[-1]


def test_nothing_is_forked_for_a_client_that_has_ended(served):
    assert subprocess.run(served.command(""), env=served.environment).returncode == 0
    served.process.send_signal(signal.SIGSTOP)
    with socket.socket(socket.AF_UNIX) as client:
        served.ask(client)
    served.process.send_signal(signal.SIGCONT)
    assert subprocess.run(served.command(""), env=served.environment).returncode == 0
    [_, line] = served.lines()
    assert "its client has ended, or has waited for 30 seconds" in line


@pytest.mark.parametrize("fault", ["raise ValueError('no good')", "raise SystemExit('no good')"])
def test_an_import_that_fails_is_every_workers_reason(tmp_path, fault):
    (tmp_path / "faulty.py").write_text(fault)
    path = os.pathsep.join([str(tmp_path), os.environ["PYTHONPATH"]])
    with serving(tmp_path, late="faulty", PYTHONPATH=path) as served:
        for _ in range(2):
            assert (
                subprocess.run(served.command("raise SystemExit(3)"), env=served.environment).returncode == 3
            )
        [first, second] = served.lines()
        assert "own imports: an import of the fork server failed: " in first == second and "no good" in first


def test_events_that_cannot_be_written_end_no_worker(served):
    (served.folder / EVENTS).mkdir()
    client, worker = served.start(WAITS)
    assert subprocess.run(served.command(""), env={**os.environ, "OMP_NUM_THREADS": "11"}).returncode == 0
    assert served.process.poll() is client.poll() is None and worker != client.pid


def test_a_server_that_can_open_no_more_files_keeps_its_workers(served):
    client, worker = served.start(WAITS)
    opened = set(map(int, os.listdir(f"/proc/{served.process.pid}/fd")))
    first_free = min(set(range(max(opened) + 2)) - opened)
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.prlimit(served.process.pid, resource.RLIMIT_NOFILE, (first_free, hard))
    for _ in range(2):
        other, own = served.start(WAITS)
        assert own == other.pid
    assert served.process.poll() is client.poll() is None and worker != client.pid
    assert "every further worker makes its own imports: " in served.lines()[-1]
