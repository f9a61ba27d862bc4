"""A fork server of few imports, and what its clients run."""

import json
import os
import secrets
import select
import socket
import subprocess
import sys
from contextlib import contextmanager, suppress

from verl_credit.host.process import fork_client
from verl_credit.host.process.fork_workers import SERVER
from verl_credit.records.run.files import EVENTS, read_json_lines

WAITS = "import os\nprint(os.getpid(), flush=True)\nimport signal\nsignal.pause()"


class Served:
    """A fork server of `this`, whose print says that the server listens, and later of another module; and its clients."""

    def __init__(self, folder, late="fractions", **environment):
        self.folder, self.name = folder, f"verl-credit-test-{secrets.token_hex(16)}"
        command = [sys.executable, "-m", SERVER, self.name, str(folder), "this", late]
        self.environment = {**os.environ, **environment}
        streams = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self.process = subprocess.Popen(command, env=self.environment, **streams)
        self.process.stdout.readline()
        self.clients: list[subprocess.Popen] = []

    def command(self, script, *words, forked=True):
        path = self.folder / "worker.py"
        path.write_text(script)
        client = ["-I", "-S", fork_client.__file__, self.name] if forked else []
        return [sys.executable, *client, str(path), *words]

    def start(self, script):
        """(the client, the id of its worker)."""
        client = subprocess.Popen(self.command(script), stdout=subprocess.PIPE, env=self.environment)
        self.clients.append(client)
        return client, int(client.stdout.readline())

    def ask(self, client, **fields):
        """Connects a client that does not wait for the answer."""
        asked = {"words": self.command("", forked=False)[1:], **fork_client.state_of_process()}
        client.connect(f"\0{self.name}")
        socket.send_fds(client, [b"\n"], [0, 1, 2])
        client.sendall(json.dumps({**asked, **fields}).encode() + b"\n")

    def lines(self):
        return [row["text"] for row in read_json_lines(self.folder / EVENTS)]

    def end(self):
        self.process.stdin.close()
        self.process.stdout.close()
        return self.process.wait(20)


@contextmanager
def serving(folder, **settings):
    one = Served(folder, **settings)
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
