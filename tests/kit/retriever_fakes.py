"""An index and an encoder that answer at once, and that fail, wait or lie when a test tells them to."""

import asyncio
import threading

import httpx
import numpy as np

from verl_credit_retriever.http.server import create_app

ROWS = 20


class FakeEncoder:
    """A text's vector is a number of its own, so that an answer shows which text it belongs to."""

    def __init__(self, *, gate: threading.Event | None = None):
        self.gate, self.entered = gate, threading.Event()
        self.broken: dict[str, Exception] = {}
        self.calls: list[int] = []
        self.encoded: list[str] = []
        self._texts: list[str] = []

    def tokenize_queries(self, queries):
        start = len(self._texts)
        self._texts.extend(queries)
        # The first id finds the text again; the others are there to be counted.
        return [[start + row, *[0] * (len(query) - 1)] for row, query in enumerate(queries)]

    def encode_tokens(self, ids_N):
        texts = [self._texts[ids[0]] for ids in ids_N]
        self.entered.set()
        if self.gate is not None:
            assert self.gate.wait(60)
        self.calls.append(len(texts))
        self.encoded += texts
        for text in texts:
            if text in self.broken:
                raise self.broken[text]
        return np.array([[ids[0]] for ids in ids_N], dtype=np.float32)

    def encode_queries(self, queries):
        return self.encode_tokens(self.tokenize_queries(queries))

    def text_of(self, vector) -> str:
        return self._texts[int(vector[0])]


class FakeIndex:
    """Hit r of a text is the document "text/r" with score -r."""

    manifest = {"kind": "flat", "rows": ROWS}
    fingerprint = "f" * 64

    def __init__(self, encoder: FakeEncoder):
        self._encoder = encoder
        self.damage = None
        self.calls: list[tuple[int, int]] = []

    def __len__(self):
        return ROWS

    def check_encoder(self, encoder):
        assert encoder is self._encoder

    def search(self, vectors_N_D, k):
        self.calls.append((len(vectors_N_D), k))
        found = [
            [
                ({"id": f"{self._encoder.text_of(v)}/{r}", "contents": f"T\n{r}"}, -float(r))
                for r in range(min(k, ROWS))
            ]
            for v in vectors_N_D
        ]
        return self.damage(found) if self.damage else found


def app_of(gate=None, damage=None, **options):
    """(the app of a fake index, its encoder)"""
    encoder = FakeEncoder(gate=gate)
    index = FakeIndex(encoder)
    index.damage = damage
    return create_app(index, encoder, **options), encoder


def client_of(app, **options) -> httpx.AsyncClient:
    """A client of an app in this process."""
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://retriever", **options)


def send(app, method: str, path: str, **request) -> httpx.Response:
    """The answer to a request by itself; ``request``: what httpx takes."""

    async def run():
        async with client_of(app) as client:
            return await client.request(method, path, **request)

    return asyncio.run(run())


async def ask(
    app, method: str, path: str, headers: list[tuple[bytes, bytes]], pieces: list[bytes], leave=None
) -> tuple[int, dict, bytes]:
    """(status, headers, body) of the app in this process, as a server hands it a request. The client goes at
    the event `leave`."""
    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": method, "scheme": "http", "path": path,
        "raw_path": path.encode(), "query_string": b"", "root_path": "", "headers": headers, "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 80),
    }  # fmt: skip
    sent, gone = [], asyncio.Event()
    messages = iter([{"type": "http.request", "body": piece, "more_body": True} for piece in pieces])

    async def receive():
        if (message := next(messages, None)) is not None:
            return message
        if not gone.is_set():
            gone.set()
            return {"type": "http.request", "body": b"", "more_body": False}
        await (leave or asyncio.Event()).wait()  # without one the client waits for its answer
        return {"type": "http.disconnect"}

    async def send(message):
        sent.append(message)

    await app(scope, receive, send)
    (start,) = [message for message in sent if message["type"] == "http.response.start"]
    body = b"".join(message.get("body", b"") for message in sent if message["type"] == "http.response.body")
    return start["status"], dict(start["headers"]), body


async def until(condition, seconds: float = 30.0):
    """Wait for `condition()`, which other tasks or threads make true."""
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.001)


def metric(text: str, name: str, **labels) -> float:
    """The value of one series in Prometheus' text; 0 when there is none."""
    series = ",".join(f'{key}="{value}"' for key, value in labels.items())
    wanted = f"verl_credit_retriever_{name}" + (f"{{{series}}}" if labels else "")
    values = [line.rsplit(" ", 1)[1] for line in text.splitlines() if line.rsplit(" ", 1)[0] == wanted]
    return float(values[0]) if values else 0.0
