"""An app behind a real socket, in a thread of the test's process."""

import socket
import threading
import time
from contextlib import contextmanager

import uvicorn


@contextmanager
def served(app, of=None, port=0, **config):
    """The port of a server of the app, in a thread of this process; ``config``: of uvicorn."""
    serving = of or uvicorn.Server(uvicorn.Config(app, **{"log_level": "error"} | config))
    with socket.create_server(("127.0.0.1", port), backlog=512) as listening:
        thread = threading.Thread(target=serving.run, kwargs={"sockets": [listening]})
        thread.start()
        try:
            while not serving.started:
                assert thread.is_alive()
                time.sleep(0.01)
            yield listening.getsockname()[1]
        finally:
            serving.should_exit = True
            thread.join()
