"""An app behind a real socket, in a thread of the test's process."""

import socket
import threading
import time
from contextlib import contextmanager

import uvicorn

from verl_credit_retriever.http.guard import limited


@contextmanager
def served(app, of=None, **limits):
    """The port of a server of the app, in a thread of this process."""
    limits = {"most": 100} | limits
    serving = of or uvicorn.Server(uvicorn.Config(app, log_level="error", http=limited(**limits)))
    with socket.create_server(("127.0.0.1", 0), backlog=512) as listening:
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
