"""One worker process: `python -m verl_credit_retriever.serving.worker LISTENER_FD READY_FD`, settings on stdin."""

import os
import socket
import sys

from verl_credit_retriever.serving.process import serve_in_this_process
from verl_credit_retriever.serving.settings import ServeSettings
from verl_credit_retriever.serving.workers import READY


def main() -> int:
    """Serve on an inherited socket. The exit codes are the server's."""
    listener_fd, ready_fd = map(int, sys.argv[1:])
    settings = ServeSettings.from_json(sys.stdin.read())
    try:
        with socket.socket(fileno=listener_fd) as listener:
            return serve_in_this_process(settings, listener, lambda: _say_ready(ready_fd))
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _say_ready(descriptor: int) -> None:
    os.write(descriptor, READY)
    os.close(descriptor)


if __name__ == "__main__":
    sys.exit(main())
