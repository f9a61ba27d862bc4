"""What reaches a server before its app: bodies, host names, and requests while it ends."""

import asyncio
import signal
import socket
import threading
import time

import httpx
import pytest

from kit.retriever_fakes import app_of, client_of, send
from kit.serving import served
from verl_credit_retriever import serve
from verl_credit_retriever.http import server
from verl_credit_retriever.settings import LOOPBACK

POST = b"POST /retrieve HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"


def ask(port, **options):
    options = {"json": {"queries": ["a"]}} | options
    return httpx.post(f"http://127.0.0.1:{port}/retrieve", trust_env=False, timeout=30, **options)


@pytest.mark.parametrize(
    "host, status",
    [
        ("localhost:8000", 200), ("127.0.0.1", 200), ("[::1]:9", 200), ("LOCALHOST", 200), ("evil.example.com", 421),
        ("127.0.0.1.evil.example.com", 421), ("", 421), ("[", 421), ("evil@127.0.0.1.com", 421),
    ],
)  # fmt: skip
def test_without_a_token_a_page_that_names_this_machine_otherwise_is_refused(host, status):
    app, _ = app_of(hosts=LOOPBACK)
    answer = send(app, "GET", "/info", headers={"Host": host})
    assert answer.status_code == status
    assert status == 200 or answer.json()["error"].startswith(
        "Host: expected one of 127.0.0.1, ::1, localhost"
    )


@pytest.mark.parametrize("kind", [None, "text/plain"])
def test_a_missing_content_type_is_named(kind):
    app, _ = app_of()
    headers = {} if kind is None else {"Content-Type": kind}
    answer = send(app, "POST", "/retrieve", content=b'{"queries": ["a"]}', headers=headers)
    assert answer.status_code == 422
    assert answer.json()["error"] == f"Content-Type: {kind or ''!r}; expected application/json"


def test_while_a_server_ends_new_requests_get_503_and_old_ones_their_answer(monkeypatch):
    monkeypatch.setattr(serve, "end_by_force_after", lambda seconds: None)
    gate = threading.Event()
    app, encoder = app_of(gate=gate)
    ending = serve._make_server(app)
    with served(app, ending) as port, httpx.Client(trust_env=False, timeout=30) as keeps:
        url = f"http://127.0.0.1:{port}"
        assert keeps.get(f"{url}/livez").status_code == 200
        answers = []
        asking = threading.Thread(target=lambda: answers.append(ask(port)))
        asking.start()
        assert encoder.entered.wait(30)
        ending.handle_exit(signal.SIGTERM, None)
        assert [keeps.get(f"{url}/{probe}").status_code for probe in ("livez", "readyz")] == [200, 503]
        for new in (keeps.post(f"{url}/retrieve", json={"queries": ["b"]}), ask(port)):
            assert (new.status_code, new.headers["Connection"], new.headers["Retry-After"]) == (
                503,
                "close",
                "1",
            )
        gate.set()
        asking.join()
        assert (answers[0].status_code, answers[0].headers["Connection"]) == (200, "close")
        with socket.create_connection(("127.0.0.1", port)) as late:
            late.sendall(POST + b"Content-Length: 9\r\n\r\n")  # and no body: it is not waited for
            deadline = time.monotonic() + 20
            while not ending.should_exit:
                assert time.monotonic() < deadline
                time.sleep(0.01)


def test_the_event_loop_turns_while_a_large_answer_is_written(monkeypatch):
    app, _ = app_of()
    alive, plain = threading.Event(), server._json

    def slow(value):
        if isinstance(value, list):
            assert alive.wait(30), "nobody else was answered meanwhile"
        return plain(value)

    async def run():
        async with client_of(app) as client:
            queries = [f"q{n}" for n in range(60)]
            asked = asyncio.create_task(client.post("/retrieve", json={"queries": queries, "topk": 20}))
            while not (await client.get("/livez")).is_success or "serialize" not in began:
                await asyncio.sleep(0)
            alive.set()
            return queries, await asked

    began = []
    monkeypatch.setattr(server, "_json", lambda value: (began.append("serialize"), slow(value))[1])
    queries, answer = asyncio.run(run())
    assert [[hit["id"] for hit in hits] for hits in answer.json()["result"]] == [
        [f"{q}/{row}" for row in range(20)] for q in queries
    ]
