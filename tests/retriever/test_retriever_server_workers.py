"""The parent of several workers: it replaces the dead, does not hurry the broken, and leaves nobody behind."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from verl_credit_retriever import start as starting
from verl_credit_retriever import workers
from verl_credit_retriever.index.manifest import fingerprint, write_manifest
from verl_credit_retriever.serve import EXIT_PORT_IN_USE
from verl_credit_retriever.settings import ServeSettings
from verl_credit_retriever.start import run_server
from verl_credit_retriever.workers import run_workers

pytestmark = pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="finds the workers in /proc")

PARENT = """
import sys
from pathlib import Path
from verl_credit_retriever.settings import ServeSettings
from verl_credit_retriever.serve import bind
from verl_credit_retriever.workers import run_workers

settings = ServeSettings(
    Path("index"), Path("encoder"), workers=2, verify="none", token="secret-token", port_file=Path(sys.argv[2])
)
command = [sys.executable, "-c", sys.argv[1], sys.argv[3]]
sys.exit(run_workers(settings, bind("127.0.0.1", 0, shared=True), command=command, end_seconds=1.0))
"""
# A worker without an encoder: it sends its number to whoever connects. The file "fail" keeps it from starting,
# the file "stuck" from ending.
WORKER = """
import json, os, signal, socket, sys
from pathlib import Path

folder, listener, ready = Path(sys.argv[1]), socket.socket(fileno=int(sys.argv[2])), int(sys.argv[3])
settings = json.loads(sys.stdin.read())
assert settings["token"].split("-") == ["secret", "token"] and settings["workers"] == 1 and settings["threads"] >= 1
assert settings["parent_pid"] == os.getppid() and os.path.isdir(os.environ["PROMETHEUS_MULTIPROC_DIR"])
if (folder / "fail").exists():
    sys.exit(3)
stuck = (folder / "stuck").exists()
signal.signal(signal.SIGTERM, lambda *_: None if stuck else sys.exit(0))
listener.listen()
listener.settimeout(0.2)
os.write(ready, b"ready")
while os.getppid() == settings["parent_pid"]:
    try:
        connection, _ = listener.accept()
    except TimeoutError:
        continue
    connection.sendall(str(os.getpid()).encode())
    connection.close()
"""


class Server:
    """A running parent, what it has said, and the folder its workers look into."""

    def __init__(self, folder):
        self.folder, self.port_file, self.errors = folder, folder / "port.json", []
        command = [sys.executable, "-c", PARENT, WORKER, str(self.port_file), str(folder)]
        self.process = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True
        )
        self._reader = threading.Thread(target=lambda: self.errors.extend(self.process.stderr), daemon=True)
        self._reader.start()

    def ready(self):
        in_time(self.port_file.exists)
        self.address = "127.0.0.1", json.loads(self.port_file.read_text())["port"]
        return self

    def workers(self) -> set[int]:
        pid = self.process.pid
        return set(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))

    def ask(self) -> int:
        """The number of the worker that answers."""
        with socket.create_connection(self.address, timeout=30) as connection:
            return int(connection.makefile().read())

    def wait(self) -> int:
        code = self.process.wait(30)
        self._reader.join(30)
        return code


@pytest.fixture
def start(tmp_path):
    """Starts a server; what is in `tmp_path` by then, its workers see."""
    started = []

    def start():
        started.append(Server(tmp_path))
        return started[-1]

    yield start
    for server in started:
        server.process.kill()
        server.process.wait()


def in_time(condition, seconds=30):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.slow
def test_a_killed_worker_is_replaced_and_one_that_keeps_failing_after_a_pause_while_the_other_serves(start):
    server = start()
    before = server.ready().workers()
    (server.folder / "fail").touch()
    victim = max(before)
    os.kill(victim, signal.SIGKILL)
    in_time(lambda: len(server.errors) == 2)
    assert {server.ask() for _ in range(10)} == before - {victim}
    assert [line.split(" ended ")[1] for line in server.errors] == [
        "with code -9; the next starts in 0 s\n",
        "with code 3; the next starts in 5 s\n",
    ]
    (server.folder / "fail").unlink()
    in_time(lambda: len(server.workers()) == 2 and server.ask() not in before)
    # One group of their own each: a terminal's Ctrl-C is the parent's to answer.
    in_time(lambda: all(os.getpgid(pid) == pid for pid in server.workers()))
    # A fork has the parent's command line, with the token in this test's code, until it starts its own program.
    in_time(lambda: all(b"secret-t" not in Path(f"/proc/{p}/cmdline").read_bytes() for p in server.workers()))
    last = server.workers()
    server.process.send_signal(signal.SIGINT)
    assert server.wait() == 0
    assert not any(Path(f"/proc/{pid}").exists() for pid in last)


@pytest.mark.slow
def test_connections_are_spread_over_the_workers(start):
    """Of 200 about half each; less than a quarter has a chance of 1e-13. With one socket, one worker can have all."""
    server = start().ready()
    answered = Counter(server.ask() for _ in range(200))
    assert set(answered) == server.workers() and min(answered.values()) > 50


def test_the_port_of_several_workers_is_taken_also_before_one_listens(tmp_path, monkeypatch, capsys):
    """Otherwise two servers, each loading its index for minutes, would then answer on one port."""
    monkeypatch.setattr(starting, "_memory_of", lambda _: "")
    codes = []

    def second(settings, listener):
        other = replace(settings, port=listener.getsockname()[1])
        codes.append(run_server(other) if not codes else 0)
        return 0

    monkeypatch.setattr(starting, "run_workers", second)
    settings = ServeSettings(tmp_path, tmp_path, port=0, workers=2)
    assert (run_server(settings), codes) == (0, [EXIT_PORT_IN_USE])
    assert "Address already in use" in capsys.readouterr().err
    assert run_server(replace(settings, port=0)) == 0


def test_all_workers_are_told_which_index_was_verified(tmp_path, monkeypatch):
    for name in ("vectors.npy", "corpus.jsonl", "offsets.npy"):
        (tmp_path / name).write_text(name)
    manifest = write_manifest(tmp_path, kind="exact", rows=1, encoder={"dim": 1})
    told = []

    def worker(command, settings, *_):
        told.append(settings)
        raise RuntimeError("no process is needed")

    monkeypatch.setattr(workers, "_Worker", worker)
    monkeypatch.setattr(workers.signal, "signal", lambda *_: None)
    settings = ServeSettings(tmp_path, Path("encoder"), workers=2)
    with pytest.raises(RuntimeError, match="no process"):
        run_workers(settings, None)
    (each,) = told
    assert (each.verify, each.index_pin) == ("none", fingerprint(manifest))


@pytest.mark.slow
def test_a_worker_that_cannot_start_ends_the_server_with_its_code(start, tmp_path):
    (tmp_path / "fail").touch()
    failing = start()
    assert failing.wait() == 3
    assert not failing.port_file.exists()


@pytest.mark.slow
def test_a_worker_that_does_not_drain_is_ended_by_force(start, tmp_path):
    (tmp_path / "stuck").touch()
    stuck = start().ready()
    workers = stuck.workers()
    stuck.process.terminate()
    assert stuck.wait() == 1
    assert not any(Path(f"/proc/{pid}").exists() for pid in workers)
