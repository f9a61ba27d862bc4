"""Ray runs this file in place of Python where it starts a worker: ``python -I -S fork_client.py NAME SCRIPT WORDS...``

It asks the fork server of this name for the worker, waits for the worker's end and ends in the same way. Without an
answer, or with a refusal, it becomes the Python that Ray would have started. It imports only what starts in milliseconds.
"""

import json
import os
import resource
import signal
import socket
import sys

PATIENCE_S = 30.0
"""Ray gives up a worker that has not registered after twice this time."""
LIMITS = (resource.RLIMIT_NOFILE, resource.RLIMIT_CORE)


def is_ours(connection: socket.socket) -> bool:
    """Whether the process at the other end has this user: process, user and group have four bytes each."""
    other = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    return int.from_bytes(other[4:8], sys.byteorder) == os.getuid()


def state_of_process() -> dict:
    """Gives what a worker inherits from the process that starts it, beside the three standard files."""
    umask = os.umask(0)
    os.umask(umask)
    with open("/proc/self/oom_score_adj", encoding="ascii") as file:
        oom_score = file.read()
    return {
        "environment": dict(os.environ),
        "folder": os.getcwd(),
        "umask": umask,
        "niceness": os.getpriority(os.PRIO_PROCESS, 0),
        "oom_score": oom_score,
        "blocked": sorted(int(one) for one in signal.pthread_sigmask(signal.SIG_BLOCK, ())),
        "limits": [[name, *resource.getrlimit(name)] for name in LIMITS],
    }


def ask(name: str, words: list[str]) -> dict:
    """Returns how the worker ended, {"status": as waitpid has it}, and {} where the server starts none."""
    with socket.socket(socket.AF_UNIX) as server:
        server.settimeout(PATIENCE_S)
        server.connect(f"\0{name}")
        if not is_ours(server):
            raise PermissionError("it is another user's")
        socket.send_fds(server, [b"\n"], [0, 1, 2])
        server.sendall(json.dumps({"words": words, **state_of_process()}).encode() + b"\n")
        with server.makefile("rb") as answers:
            if not json.loads(answers.readline() or b"{}").get("starts"):
                return {}
            server.settimeout(None)
            return json.loads(
                answers.readline() or b'{"status": 9}'
            )  # the server was killed, and its workers with it


def end_as(status: int) -> None:
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        if number != signal.SIGKILL:
            signal.signal(number, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the worker has dumped its own
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [number])
        os.kill(os.getpid(), number)
    os._exit(os.waitstatus_to_exitcode(status))


if __name__ == "__main__":
    try:
        answer = ask(sys.argv[1], sys.argv[2:])
    except (OSError, ValueError) as error:
        print(f"this worker makes its own imports, without the fork server: {error}", file=sys.stderr)
        answer = {}
    if "status" in answer:
        end_as(answer["status"])
    os.execv(sys.executable, [sys.executable, *sys.argv[2:]])
