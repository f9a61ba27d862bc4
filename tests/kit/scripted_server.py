"""Loopback search servers that misbehave on command, and what a test needs to search them."""

import asyncio
import json
import socket
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


def hits(*scores):
    return [
        {"document": {"id": f"d{n}", "contents": f"T{n}\na\nb"}, "score": s} for n, s in enumerate(scores)
    ]


class Scripted(ThreadingHTTPServer):
    """Plays `script`, one step per request, then answers well.

    A step: (status, body) or (status, body, headers); "hang" says nothing; "close" hangs up; "half" sends half of
    a good answer and hangs up; "trickle" sends half of it and then says nothing more.
    """

    daemon_threads = True
    request_queue_size = 128  # many connections at a time, none of them reset

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.script, self.requests, self.request_headers, self.connections = [], [], [], 0
        self.info = None
        self.hanging, self.release = threading.Event(), threading.Event()
        self.url = f"http://127.0.0.1:{self.server_port}"

    def handle_error(self, request, client_address):
        pass  # a client that gives up is expected here


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # head and body are two writes

    def setup(self):
        super().setup()
        self.server.connections += 1

    def do_GET(self):
        self.server.request_headers.append(dict(self.headers))
        if self.path != "/info" or self.server.info is None:
            return self._send(404, b"")
        self._send(200, self.server.info)

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.requests.append((self.path, body))
        self.server.request_headers.append(dict(self.headers))
        good = (200, {"result": [hits(*[1.0 - n / 10 for n in range(body["topk"])])]})
        step = self.server.script.pop(0) if self.server.script else good
        if isinstance(step, tuple):
            return self._send(*step)
        self.close_connection = True
        if step in ("half", "trickle"):
            content = json.dumps(good[1]).encode()
            self._head(200, len(content), {})
            self.wfile.write(content[: len(content) // 2])
            self.wfile.flush()
        if step in ("hang", "trickle"):
            self.server.hanging.set()
            self.server.release.wait(60)

    def _send(self, status, answer, headers=None):
        content = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
        self._head(status, len(content), headers or {})
        self.wfile.write(content)

    def _head(self, status, length, headers):
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(length))
        self.end_headers()

    def log_message(self, *_):
        pass


@contextmanager
def scripted_server():
    with Scripted() as scripted:
        thread = threading.Thread(target=scripted.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield scripted
        finally:
            scripted.release.set()
            scripted.shutdown()
            thread.join()


@contextmanager
def dead_port():
    """An address where connections are refused: bound, but nobody listens."""
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{closed.getsockname()[1]}"


class FakeTime:
    """A clock that only pauses move, and the pauses that were asked for."""

    def __init__(self):
        self.now, self.pauses = 1000.0, []

    def clock(self):
        return self.now

    async def sleep(self, seconds):
        self.pauses.append(seconds)
        self.now += seconds


def search(client, query="river"):
    async def run():
        try:
            return await client.search(query)
        finally:
            await client.aclose()

    return asyncio.run(run())
